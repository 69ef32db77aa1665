# Copyright 2026 the multi_policy_async authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Anthropic messages body -> AgentRequest, so that a conversation is the same one whatever protocol it came in."""

from typing import Any

from .checks import array, boolean, fault, integer, mapping, optional, string
from .constraints import forced_call, json_format, one_constraint
from .content import Part, Readers, joined, lower_content, lower_part, text_part
from .errors import BadRequest, UnsupportedValue
from .image_parts import anthropic_image
from .openai_lowering import lower_sampling, lower_stops
from .request import AgentRequest, Constraint, Message

_PARTS: Readers = {"text": text_part}
_PARTS_WITH_IMAGES: Readers = {**_PARTS, "image": anthropic_image}
_THINKING = ("thinking", "redacted_thinking")


def lower_messages(body: dict[str, Any]) -> AgentRequest:
    """Check and lower a body.

    Raises:
        BadRequest: naming the field at fault.
    """
    if body.get("mcp_servers"):
        raise UnsupportedValue("mcp_servers is not supported: tools run at the client", param="mcp_servers")
    tools, parallel, forced = _tools(body)
    messages = _system(body.get("system"))
    for index, message in enumerate(array(body.get("messages"), "messages")):
        messages += _message(mapping(message, f"messages[{index}]"), f"messages[{index}]")
    if not body["messages"]:
        raise BadRequest("messages is empty", param="messages")
    if messages[-1]["role"] == "assistant":
        raise UnsupportedValue("a last message of the assistant (prefill) is not supported", param="messages")
    return AgentRequest(
        messages=messages,
        tools=tools,
        parallel_tool_calls=parallel,
        asked=lower_sampling({name: body.get(name) for name in ("temperature", "top_p", "top_k")}),
        max_tokens=integer(body.get("max_tokens"), "max_tokens", 1),
        stop=lower_stops(optional(body, "stop_sequences", array), "stop_sequences"),
        constraint=one_constraint(forced, _format(body)),
        stream=optional(body, "stream", boolean, False),
        model=optional(body, "model", string),
    )


def _tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, bool, Constraint | None]:
    tools = []
    for index, tool in enumerate(optional(body, "tools", array, [])):
        where = f"tools[{index}]"
        if mapping(tool, where).get("type", "custom") != "custom":
            raise UnsupportedValue(f"{where}: the server tool {tool['type']!r} is not supported", param=where)
        function = {
            "name": string(tool.get("name"), f"{where}.name"),
            "parameters": mapping(tool.get("input_schema"), f"{where}.input_schema"),
        }
        if tool.get("description") is not None:
            function["description"] = string(tool["description"], f"{where}.description")
        tools.append({"type": "function", "function": function})
    choice = optional(body, "tool_choice", mapping, {"type": "auto"})
    constraint = None
    if choice.get("type") in ("any", "tool"):
        named = string(choice.get("name"), "tool_choice.name") if choice["type"] == "tool" else None
        constraint = forced_call(tools, named)
    elif choice.get("type") not in ("auto", "none"):
        raise fault("tool_choice.type", "'auto', 'none', 'any' or 'tool'", choice.get("type"))
    serial = choice.get("disable_parallel_tool_use")
    parallel = serial is None or not boolean(serial, "tool_choice.disable_parallel_tool_use")
    return (tools if tools and choice["type"] != "none" else None), parallel, constraint


def _format(body: dict[str, Any]) -> Constraint | None:
    config = optional(body, "output_config", mapping, {})
    # Older SDKs have the format by itself.
    name, form = "output_config.format", config.get("format")
    if form is None:
        name, form = "output_format", body.get("output_format")
    return None if form is None else json_format(mapping(form, name), name, lambda f: f.get("schema"))


def _system(system: Any) -> list[Message]:
    if system is None or system == []:
        return []
    return [{"role": "system", "content": lower_content(system, "system", _PARTS)}]


def _message(message: dict[str, Any], where: str) -> list[Message]:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise fault(f"{where}.role", "'user' or 'assistant'", role)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = array(content, f"{where}.content")
    if not blocks:
        raise fault(f"{where}.content", "a string or a non-empty array of blocks", content)
    parts = [(mapping(block, f"{where}.content[{i}]"), f"{where}.content[{i}]") for i, block in enumerate(blocks)]
    return [_assistant(parts)] if role == "assistant" else _user(parts, role)


def _assistant(parts: list[tuple[dict[str, Any], str]]) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block, at in parts:
        kind = block.get("type")
        if kind == "text":
            texts.append(string(block.get("text"), f"{at}.text"))
        elif kind == "tool_use":
            name = string(block.get("name"), f"{at}.name")
            function = {"name": name, "arguments": mapping(block.get("input"), f"{at}.input")}
            calls.append({"id": string(block.get("id"), f"{at}.id"), "type": "function", "function": function})
        elif kind in _THINKING:
            thoughts.append(block.get("thinking") if isinstance(block.get("thinking"), str) else "")
        else:
            raise UnsupportedValue(f"{at}: blocks of type {kind!r} are not supported by this model", param=at)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _user(parts: list[tuple[dict[str, Any], str]], role: str) -> list[Message]:
    lowered: list[Message] = []
    own: list[Part] = []
    for block, at in parts:
        if block.get("type") == "tool_result":
            call_id, result = string(block.get("tool_use_id"), f"{at}.tool_use_id"), block.get("content")
            content = "" if result is None else lower_content(result, f"{at}.content", _PARTS_WITH_IMAGES)
            lowered.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            own.append(lower_part(block, at, _PARTS_WITH_IMAGES if role == "user" else _PARTS))
    if own:
        lowered.append({"role": role, "content": joined(own)})
    return lowered
