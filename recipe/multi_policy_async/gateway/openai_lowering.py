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
"""OpenAI chat-completions body -> AgentRequest. Whatever cannot be done is refused here, before anything is sampled."""

from typing import Any

from .checks import array, boolean, fault, integer, mapping, number, optional, parse_json, string
from .constraints import json_format, one_constraint, openai_tool_choice
from .content import Readers, lower_content, refusal_part, text_part
from .errors import BadRequest, UnsupportedValue
from .image_parts import openai_image
from .request import AgentRequest, Constraint, Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ROLES_WITH_IMAGES = ("user", "tool")
_PARTS: Readers = {"text": text_part, "refusal": refusal_part}
_PARTS_WITH_IMAGES: Readers = {**_PARTS, "image_url": openai_image}
_MAX_STOPS = 16
# Arguments of the renderer itself: the template and what it is applied to are not the client's to choose here.
_RESERVED = frozenset(
    ("conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "return_assistant_tokens_mask")
)


def lower_chat(body: dict[str, Any], *, max_choices: int) -> AgentRequest:
    """Check and lower a body.

    Raises:
        BadRequest: naming the field at fault.
    """
    _refuse_unsupported(body)
    tools, parallel, forced = _tools(body)
    stream = optional(body, "stream", boolean, False)
    options = optional(body, "stream_options", mapping, {})
    logprobs = optional(body, "logprobs", boolean, False)
    top_logprobs = optional(body, "top_logprobs", lambda v, p: integer(v, p, 0, 20), 0)
    if top_logprobs and not logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return AgentRequest(
        messages=_messages(body),
        tools=tools,
        parallel_tool_calls=parallel,
        asked=lower_sampling(body),
        max_tokens=lower_max_tokens(body),
        stop=lower_stops(body.get("stop")),
        n=optional(body, "n", lambda v, p: integer(v, p, 1, max_choices), 1),
        stream=stream,
        include_usage=optional(options, "include_usage", boolean, False),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        model=optional(body, "model", string),
        constraint=one_constraint(forced, _format(body)),
        template_kwargs=_template_kwargs(optional(body, "chat_template_kwargs", mapping, {})),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            raise UnsupportedValue(f"{name} is not supported; use tools", param=name)
    if body.get("web_search_options") is not None:
        raise UnsupportedValue("web search is not supported; use tools", param="web_search_options")
    modalities = body.get("modalities")
    if body.get("audio") is not None or (modalities is not None and modalities != ["text"]):
        raise UnsupportedValue("only text can be generated", param="modalities")


def _format(body: dict[str, Any]) -> Constraint | None:
    form = optional(body, "response_format", mapping, {"type": "text"})
    return json_format(
        form, "response_format", lambda f: mapping(f.get("json_schema"), "response_format.json_schema").get("schema")
    )


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in _RESERVED:
            raise BadRequest(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    return kwargs


def lower_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling values of a body, by our names.

    Raises:
        BadRequest: naming the field at fault.
    """
    bounds = {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
    }
    asked: dict[str, Any] = {
        name: number(body[name], name, low, high) for name, (low, high) in bounds.items() if body.get(name) is not None
    }
    if asked.get("top_p") == 0.0 or asked.get("repetition_penalty") == 0.0:
        name = "top_p" if asked.get("top_p") == 0.0 else "repetition_penalty"
        raise fault(name, "above 0", 0.0)
    if body.get("top_k") is not None:
        asked["top_k"] = integer(body["top_k"], "top_k", -1)
    if body.get("seed") is not None:
        asked["seed"] = integer(body["seed"], "seed", -(2**63), 2**63 - 1)
    if body.get("logit_bias"):
        asked["logit_bias"] = mapping(body["logit_bias"], "logit_bias")
    return asked


def lower_max_tokens(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return integer(body[name], name, 1)
    return None


def lower_stops(value: Any, param: str = "stop") -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else array(value, param)
    if len(stops) > _MAX_STOPS:
        raise fault(param, f"at most {_MAX_STOPS} strings", stops)
    for index, stop in enumerate(stops):
        if not string(stop, f"{param}[{index}]"):
            raise fault(f"{param}[{index}]", "a non-empty string", stop)
    return tuple(stops)


def _tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, bool, Constraint | None]:
    parallel = optional(body, "parallel_tool_calls", boolean, True)
    tools = optional(body, "tools", array, [])
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if mapping(tool, where).get("type") != "function":
            raise UnsupportedValue(f"{where}.type must be 'function'", param=f"{where}.type")
        function = mapping(tool.get("function"), f"{where}.function")
        if not string(function.get("name"), f"{where}.function.name"):
            raise fault(f"{where}.function.name", "a non-empty string", "")
    offered, constraint = openai_tool_choice(body.get("tool_choice"), tools)
    return offered, parallel, constraint


def _messages(body: dict[str, Any]) -> list[Message]:
    messages = array(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    return [_message(mapping(message, f"messages[{i}]"), f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fault(f"{where}.role", f"one of {sorted(_ROLES)}", role)
    content = "" if message.get("content") is None else message["content"]
    readers = _PARTS_WITH_IMAGES if role in _ROLES_WITH_IMAGES else _PARTS
    lowered: Message = {"role": _ROLES[role], "content": lower_content(content, f"{where}.content", readers)}
    if message.get("name") is not None:
        lowered["name"] = string(message["name"], f"{where}.name")
    if role == "assistant":
        if message.get("tool_calls"):
            calls = array(message["tool_calls"], f"{where}.tool_calls")
            lowered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        elif message.get("content") is None and message.get("refusal") is None:
            raise fault(f"{where}.content", "text, or tool_calls must be given", None)
        reasoning = message.get("reasoning_content")
        if reasoning is not None:
            lowered["reasoning_content"] = string(reasoning, f"{where}.reasoning_content")
    elif message.get("content") is None:
        raise fault(f"{where}.content", "a string or an array of parts", None)
    if role == "tool":
        lowered["tool_call_id"] = string(message.get("tool_call_id"), f"{where}.tool_call_id")
    return lowered


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if mapping(call, where).get("type", "function") != "function":
        raise UnsupportedValue(f"{where}.type must be 'function'", param=f"{where}.type")
    function = mapping(call.get("function"), f"{where}.function")
    arguments = string(function.get("arguments", "{}"), f"{where}.function.arguments")
    return {
        "id": string(call.get("id", ""), f"{where}.id"),
        "type": "function",
        "function": {
            "name": string(function.get("name"), f"{where}.function.name"),
            "arguments": parse_arguments(arguments),
        },
    }


def parse_arguments(arguments: str) -> Any:
    """Tool-call arguments as chat templates want them: an object, or the text as it is when it is none."""
    try:
        parsed = parse_json(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def as_object(arguments: Any) -> dict[str, Any]:
    """Parsed arguments in Anthropic's form, which has objects only."""
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
