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
"""Text of an answer -> content, reasoning and tool calls, piece by piece, by the model family's parser.

A family is chosen per model (``ModelBinding.tool_parser``, from verl's ``rollout.multi_turn.format``):

* ``hermes`` (Qwen 2.5 and 3, Hermes, SmolLM2, ...) is a response schema read by transformers' response parser, which
  needs no torch.
* ``model`` is the response schema that the model ships in its tokenizer_config.json.
* Any other name is one of verl's tool parsers; the first request with tools then imports verl and with it torch. Not
  ``gpt-oss``, whose channels are no tool syntax: without a parser of the channels its answers cannot be shown.

A tool call that does not parse stays what it is, text: the client sees what the model said.
"""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from transformers.utils.chat_parsing_utils import recursive_parse

from .detokenizer import Detokenizer, StopScanner

logger = logging.getLogger(__name__)

THINK = ("<think>", "</think>")

_HERMES_CALLS = {
    "type": "array",
    "x-regex-iterator": r"<tool_call>\s*(.*?)\s*</tool_call>",
    "items": {
        "x-parser": "json",
        "type": "object",
        "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["name"],
    },
}


@dataclass(slots=True)
class ToolCall:
    """One parsed call; ``arguments`` is JSON text, as the protocols carry it."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolFamily(Protocol):
    """How one model family writes tool calls.

    Attributes:
        opening: text that begins a tool call; what comes from there on is shown once parsed.
        special_markers: the opening may be a special token.
        stop_token_ids: end a turn with tool calls, besides the model's own.
    """

    opening: str
    special_markers: bool
    stop_token_ids: tuple[int, ...]

    def parse(self, text: str, ids: list[int], tools: list[dict[str, Any]]) -> list[ToolCall]:
        """The calls in ``text``, which begins with ``opening``; none when it holds none that parse.

        Args:
            ids: the whole answer's, for parsers that read special tokens.
        """


class SchemaFamily:
    """A response schema, as models may ship one (transformers' ``response_schema``)."""

    stop_token_ids = ()

    def __init__(self, tool_calls_schema: dict[str, Any], opening: str, *, special_markers: bool) -> None:
        self._schema = tool_calls_schema
        self.opening = opening
        self.special_markers = special_markers

    def parse(self, text: str, ids: list[int], tools: list[dict[str, Any]]) -> list[ToolCall]:
        try:
            return [_tool_call(entry) for entry in recursive_parse(text, self._schema) or []]
        except _UNREADABLE as error:
            logger.info("a tool call does not parse and stays text: %s", error)
            return []


# What a model wrote is of any shape. ValueError: also no JSON, and surrogates that cannot be encoded.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def _tool_call(entry: dict[str, Any]) -> ToolCall:
    function = entry.get("function", entry)
    name, arguments = function["name"], function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()
    return ToolCall(name, arguments)


# Attributes of verl's parsers for the text without which they read no call.
_OPENINGS = ("tool_calls_section_start_token", "tool_calls_start_token", "tool_call_start_token")


class VerlFamily:
    """One of verl's tool parsers (verl/experimental/agent_loop/tool_parser.py)."""

    special_markers = True

    def __init__(self, name: str, model_path: str) -> None:
        from transformers import AutoTokenizer
        from verl.experimental.agent_loop.tool_parser import ToolParser
        from verl.tools.schemas import OpenAIFunctionToolSchema

        self._parser = ToolParser.get_tool_parser(name, AutoTokenizer.from_pretrained(model_path))
        self.stop_token_ids = tuple(self._parser.stop_token_ids)
        # Holding from any markup on is right for parsers that do not tell.
        self.opening = next((getattr(self._parser, n) for n in _OPENINGS if hasattr(self._parser, n)), "<")
        self._schema = OpenAIFunctionToolSchema
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tool-parser")

    def parse(self, text: str, ids: list[int], tools: list[dict[str, Any]]) -> list[ToolCall]:
        parsing = self._parser.extract_tool_calls(ids, self._schemas(tools))
        try:
            # verl's parsers are coroutines that only offload pure functions: they run to their end in a thread.
            _, calls = self._thread.submit(asyncio.run, parsing).result()
            return [_tool_call({"name": call.name, "arguments": call.arguments}) for call in calls]
        except _UNREADABLE as error:
            logger.info("a tool call does not parse and stays text: %s", error)
            return []

    def _schemas(self, tools: list[dict[str, Any]]) -> list[Any]:
        """The tools in verl's form; parameters of those that have none there come as text."""
        schemas = []
        for tool in tools:
            function = {"description": "", **tool["function"]}
            try:
                schemas.append(self._schema.model_validate({**tool, "function": function}))
            except ValueError as error:
                logger.info("the parameters of tool %s are text: %s", function["name"], error)
        return schemas


def make_tool_family(name: str, model_path: str, response_schema: dict[str, Any] | None) -> ToolFamily:
    """The family of that name; may take seconds.

    Raises:
        ValueError: unknown to verl, not served, or ``model`` without a schema in the model's folder.
    """
    if name == "gpt-oss":
        raise ValueError("tool_parser 'gpt-oss' is not served: its answers come in channels, which nothing here reads")
    if name == "hermes":
        return SchemaFamily(_HERMES_CALLS, "<tool_call>", special_markers=False)
    if name == "model":
        calls = (response_schema or {}).get("properties", {}).get("tool_calls")
        if not calls:
            raise ValueError(f"tool_parser 'model': {model_path} ships no response_schema with tool_calls")
        return SchemaFamily(calls, _beginning(calls), special_markers=True)
    return VerlFamily(name, model_path)


def _beginning(schema: dict[str, Any]) -> str:
    """The text with which every match of a schema's expression begins; ``<`` where that is not plain to see."""
    expression = schema.get("x-regex-iterator") or schema.get("x-regex") or ""
    plain = re.match(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s])+(?![*?{])", expression)
    if plain is None or "|" in expression.replace("\\|", ""):
        return "<"
    return re.sub(r"\\(.)", r"\1", plain[0])


@dataclass(slots=True)
class Parsed:
    """What has become known of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    cut: bool = False  # something was sampled that is not shown


class PlainParser:
    """Everything is content: no tools were offered and no reasoning is split off."""

    def feed(self, text: str) -> Parsed:
        return Parsed(content=text)

    def finish(self, ids: list[int]) -> Parsed:
        return Parsed()


class CallParser:
    """The answer is one call as JSON, by the engine's grammar; one that was cut is content."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Parsed:
        self._text += text
        return Parsed()

    def finish(self, ids: list[int]) -> Parsed:
        try:
            return Parsed(tool_calls=[_tool_call(json.loads(self._text))])
        except _UNREADABLE:
            return Parsed(content=self._text)


class OutputParser:
    """Splits one answer: reasoning first, then content, then tool calls.

    Args:
        family: None when no tool may be called.
        think: the markers of reasoning, None when it stays part of the content.
        thinking: the prompt ends inside an open reasoning block.
        parallel: False shows the first tool call only, as ``parallel_tool_calls: false`` promises.
    """

    def __init__(
        self,
        family: ToolFamily | None,
        tools: list[dict[str, Any]],
        think: tuple[str, str] | None,
        *,
        thinking: bool,
        parallel: bool = True,
    ) -> None:
        self._family = family
        self._tools = tools
        self._parallel = parallel
        self._think = think
        self._state = "thinking" if think and thinking else "start" if think else "content"
        self._opening = StopScanner([family.opening] if family else [])
        self._closing = StopScanner([think[1]] if think else [])
        self._start = ""
        self._calls = ""
        self._behind_marker = False  # only new lines have come since a marker of reasoning

    def feed(self, text: str) -> Parsed:
        """The parts that are certain now."""
        parsed = Parsed()
        if self._state == "start":
            self._start += text
            text = self._begin()
        if self._state == "thinking" and (text := self._without_new_lines(text)):
            parsed.reasoning = self._closing.feed(text)
            if self._closing.matched is None:
                return parsed
            self._state, text, self._behind_marker = "content", self._closing.rest, True
        if self._state == "content" and (text := self._without_new_lines(text)):
            parsed.content = self._opening.feed(text)
            if self._opening.matched is not None:
                self._state, text = "calls", self._opening.matched + self._opening.rest
        if self._state == "calls":
            self._calls += text
        return parsed

    def _begin(self) -> str:
        """Whether the answer begins with reasoning; the text to go on with, empty while undecided."""
        opening = self._think[0]
        stripped = self._start.lstrip()
        if stripped.startswith(opening):
            self._state, self._behind_marker = "thinking", True
            return stripped[len(opening) :]
        if opening.startswith(stripped):
            return ""
        self._state = "content"
        return self._start

    def _without_new_lines(self, text: str) -> str:
        """The text without the new lines that stand between a marker and what it marks."""
        if self._behind_marker:
            text = text.lstrip("\n")
            self._behind_marker = not text
        return text

    def finish(self, ids: list[int]) -> Parsed:
        """The rest: what was held back, and the tool calls."""
        parsed = Parsed()
        if self._state == "start":
            parsed.content = self._start
        elif self._state == "thinking":
            parsed.reasoning = self._closing.flush()
        elif self._state == "content":
            parsed.content = self._opening.flush()
        else:
            parsed.tool_calls = self._family.parse(self._calls, ids, self._tools)
            if not parsed.tool_calls:
                parsed.content = self._calls
            elif not self._parallel and len(parsed.tool_calls) > 1:
                parsed.tool_calls, parsed.cut = parsed.tool_calls[:1], True
        return parsed


Parser = PlainParser | CallParser | OutputParser


class Reading(NamedTuple):
    """How the sampled ids of one call are read."""

    new_detokenizer: Callable[[], Detokenizer]
    new_parser: Callable[[], Parser]
    stop_token_ids: tuple[int, ...]
