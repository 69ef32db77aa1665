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
"""Answers that must match a schema: JSON mode and a forced tool call.

The engine masks the distribution it samples from, so such an answer is no sample of the policy: its row is marked and
the ingestor counts it as ``constrained`` instead of training it. What is asked of the engine is SGLang's sampling
parameter ``json_schema``; a forced tool call is an object with the tool's name and arguments.
"""

from collections.abc import Callable
from typing import Any

import orjson

from .checks import array, fault, mapping, string
from .errors import BadRequest, UnsupportedValue
from .request import Constraint

_ANY_OBJECT = {"type": "object"}


def json_format(form: dict[str, Any], where: str, schema_of: Callable[[dict[str, Any]], Any]) -> Constraint | None:
    """The constraint of OpenAI's ``response_format`` (or ``text.format``), None for text.

    Args:
        schema_of: where the schema of a ``json_schema`` stands in ``form``.

    Raises:
        BadRequest: malformed, or another format.
    """
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(_text(_ANY_OBJECT), where)
    if kind == "json_schema":
        return Constraint(_text(mapping(schema_of(form), f"{where}.schema")), where)
    raise UnsupportedValue(f"{where} {kind!r} is not supported", param=where)


def forced_call(tools: list[dict[str, Any]], name: str | None) -> Constraint:
    """The constraint of a tool choice that forces a call.

    Args:
        tools: OpenAI's function tools.
        name: of the tool to call, None for any.

    Raises:
        BadRequest: there is no such tool.
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        raise BadRequest(f"tool_choice names {name!r}, which is none of tools", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, "arguments": f.get("parameters") or _ANY_OBJECT},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for f in functions
    ]
    return Constraint(_text(calls[0] if len(calls) == 1 else {"anyOf": calls}), "tool_choice", is_call=True)


def openai_tool_choice(
    choice: Any, tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]] | None, Constraint | None]:
    """The tools that OpenAI's ``tool_choice`` leaves, None for none of them, and its constraint if it forces a call.

    Raises:
        BadRequest: it is of another form, or names no tool.
    """
    if choice in (None, "auto", "none"):
        return (tools if tools and choice != "none" else None), None
    if choice == "required":
        return tools, forced_call(tools, None)
    if not isinstance(choice, dict):
        raise fault("tool_choice", "'auto', 'none', 'required' or an object", choice)
    choice = flat(choice)
    if choice.get("type") == "function":
        return tools, forced_call(tools, string(choice.get("name"), "tool_choice.name"))
    if choice.get("type") == "allowed_tools":
        if (mode := choice.get("mode")) not in ("auto", "required"):
            raise fault("tool_choice.mode", "'auto' or 'required'", mode)
        return openai_tool_choice(mode, _allowed(choice, tools))
    raise UnsupportedValue(f"tool_choice of type {choice.get('type')!r} is not supported", param="tool_choice")


def flat(named: Any) -> Any:
    """What names tools, as the responses API writes it: chat completions nest it under the name of its type."""
    kind = named.get("type") if isinstance(named, dict) else None
    nested = named.get(kind) if isinstance(kind, str) else None
    return {**nested, "type": kind} if isinstance(nested, dict) else named


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = set()
    for index, entry in enumerate(array(choice.get("tools"), "tool_choice.tools")):
        where = f"tool_choice.tools[{index}]"
        entry = flat(mapping(entry, where))
        if entry.get("type") != "function":
            raise UnsupportedValue(f"{where}.type must be 'function'", param=f"{where}.type")
        names.add(string(entry.get("name"), f"{where}.name"))
    if not names:
        raise fault("tool_choice.tools", "a non-empty array", [])
    if unknown := names.difference(tool["function"]["name"] for tool in tools):
        raise BadRequest(f"tool_choice allows {sorted(unknown)}, which are none of tools", param="tool_choice.tools")
    return [tool for tool in tools if tool["function"]["name"] in names]


def one_constraint(call: Constraint | None, form: Constraint | None) -> Constraint | None:
    """A forced call, or a format.

    Raises:
        BadRequest: both.
    """
    if call is not None and form is not None:
        raise BadRequest(f"tool_choice forces a call and {form.param} a format: only one can be", param="tool_choice")
    return call or form


def _text(schema: dict[str, Any]) -> str:
    return orjson.dumps(schema).decode()
