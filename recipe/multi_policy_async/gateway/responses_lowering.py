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
"""OpenAI responses body -> AgentRequest, so that agent loops built on that API need no other setting."""

from collections.abc import Callable
from typing import Any

from .checks import array, boolean, fault, integer, mapping, optional, string
from .constraints import flat, json_format, one_constraint, openai_tool_choice
from .content import Readers, lower_content, refusal_part, text_part
from .errors import BadRequest, UnsupportedValue
from .image_parts import responses_image
from .openai_lowering import lower_sampling, parse_arguments
from .request import AgentRequest, Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS: Readers = {**dict.fromkeys(("input_text", "output_text", "text"), text_part), "refusal": refusal_part}
_PARTS_WITH_IMAGES: Readers = {**_PARTS, "input_image": responses_image}


def lower_responses(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> AgentRequest:
    """Check and lower a body.

    Args:
        conversation_of: messages up to and including the answer of an earlier response, by its id, without its
            instructions.

    Raises:
        BadRequest: naming the field at fault.
    """
    _refuse_unsupported(body)
    tools = _tools(body)
    offered, forced = openai_tool_choice(body.get("tool_choice"), tools)
    form = _format(body)
    messages: list[Message] = []
    instructions, previous = optional(body, "instructions", string), optional(body, "previous_response_id", string)
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    own_messages = len(messages)
    if previous is not None:
        messages += conversation_of(previous)
    messages += _input(body.get("input"))
    echoed = _echoed(body)
    if not messages:
        raise BadRequest("input is empty", param="input")
    limit = optional(body, "max_output_tokens", lambda v, p: integer(v, p, 1))
    return AgentRequest(
        messages=messages,
        tools=offered,
        parallel_tool_calls=optional(body, "parallel_tool_calls", boolean, True),
        asked=lower_sampling(body),
        max_tokens=limit,
        stream=optional(body, "stream", boolean, False),
        constraint=one_constraint(forced, json_format(form, "text.format", lambda f: f.get("schema"))),
        model=optional(body, "model", string),
        own_messages=own_messages,
        echoed=echoed,
        told={
            "instructions": instructions,
            "previous_response_id": previous,
            "max_output_tokens": limit,
            "tools": [{"description": None, "parameters": None, "strict": None, **t} for t in body.get("tools") or ()],
            "tool_choice": "auto" if body.get("tool_choice") is None else flat(body["tool_choice"]),
            "text": {"format": form},
            "metadata": _metadata(body),
        },
    )


def _echoed(body: dict[str, Any]) -> frozenset[str]:
    """Request ids within the ids that the client sends back, of a response or of its message items."""
    items = body["input"] if isinstance(body.get("input"), list) else []
    ids = [item["id"].partition("_")[2].rpartition(":")[0] for item in items if isinstance(item.get("id"), str)]
    return frozenset([*ids, (body.get("previous_response_id") or "").removeprefix("resp_")])


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("background"):
        raise UnsupportedValue("background responses are not supported", param="background")
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise UnsupportedValue(f"{name} is not supported: nothing is stored here", param=name)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for index, tool in enumerate(optional(body, "tools", array, [])):
        where = f"tools[{index}]"
        if mapping(tool, where).get("type") != "function":
            raise UnsupportedValue(f"{where}: tools of type {tool.get('type')!r} are not supported", param=where)
        function = {"name": string(tool.get("name"), f"{where}.name")}
        for name, check in (("description", string), ("parameters", mapping)):
            if tool.get(name) is not None:
                function[name] = check(tool[name], f"{where}.{name}")
        tools.append({"type": "function", "function": function})
    return tools


def _format(body: dict[str, Any]) -> dict[str, Any]:
    text = optional(body, "text", mapping, {})
    return {"type": "text"} if text.get("format") is None else mapping(text["format"], "text.format")


def _metadata(body: dict[str, Any]) -> dict[str, str]:
    metadata = optional(body, "metadata", mapping, {})
    return {name: string(value, f"metadata.{name}") for name, value in metadata.items()}


def _input(given: Any) -> list[Message]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    thought: str | None = None
    for index, item in enumerate(array(given, "input")):
        where = f"input[{index}]"
        kind = mapping(item, where).get("type", "message")
        if kind == "reasoning":
            thought = _thought(item)
            continue
        if kind == "function_call":
            _answer(messages, thought)["tool_calls"].append(_function_call(item, where))
        elif kind == "function_call_output":
            call_id = string(item.get("call_id"), f"{where}.call_id")
            output = lower_content(item.get("output"), f"{where}.output", _PARTS_WITH_IMAGES)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise fault(f"{where}.role", f"one of {sorted(_ROLES)}", role)
            readers = _PARTS_WITH_IMAGES if role == "user" else _PARTS
            content = lower_content(item.get("content"), f"{where}.content", readers)
            messages.append({"role": _ROLES[role], "content": content})
            if role == "assistant" and thought:
                messages[-1]["reasoning_content"] = thought
        else:
            raise UnsupportedValue(f"{where}: items of type {kind!r} are not supported", param=where)
        thought = None
    return messages


def _answer(messages: list[Message], thought: str | None) -> Message:
    """The assistant message that a function call belongs to: its items come one by one, a thought first."""
    if thought:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", [])
    return messages[-1]


def _function_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = string(item.get("arguments"), f"{where}.arguments")
    function = {"name": string(item.get("name"), f"{where}.name"), "arguments": parse_arguments(arguments)}
    return {"id": string(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": function}


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content") or []
    texts = [p.get("text") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))
