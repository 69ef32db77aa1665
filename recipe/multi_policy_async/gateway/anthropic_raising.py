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
"""Exchange -> Anthropic message, whole or as its events."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from .call import Call, Exchange
from .metadata import metadata
from .openai_lowering import as_object, parse_arguments
from .output_parsing import Parsed, ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Writes one exchange in Anthropic's form."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._call = exchange.calls[0]

    def whole(self) -> dict[str, Any]:
        """The body of a non-streamed answer."""
        call = self._call
        content: list[dict[str, Any]] = []
        if call.reasoning:
            content.append({"type": "thinking", "thinking": call.reasoning, "signature": ""})
        if call.content or not call.tool_calls:
            content.append({"type": "text", "text": call.content})
        for tool_call in call.tool_calls:
            content.append({**_tool_use(tool_call), "input": _input(tool_call)})
        return {**self._message(content), **_stop(call), "usage": self._usage(), "metadata": metadata(self._exchange)}

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they become known; an error ends the stream with an ``error`` event."""
        exchange, call = self._exchange, self._call
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(output=0)}
        out = [_event("message_start", message=start)]
        blocks = _Blocks()
        async for events in exchange.news():
            for event in events:
                out += blocks.add(event.parsed)
            if out:
                yield b"".join(out)
                out = []
        if exchange.error is not None:
            error = exchange.error.anthropic_body()
            yield b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
            return
        out = blocks.end()
        more = {"usage": self._usage(), "metadata": metadata(exchange)}
        out += [_event("message_delta", delta=_stop(call), **more), _event("message_stop")]
        yield b"".join(out)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._exchange.exchange_id}",
            "type": "message",
            "role": "assistant",
            "model": self._exchange.model_id,
            "content": content,
        }

    def _usage(self, output: int | None = None) -> dict[str, Any]:
        call = self._call
        return {
            "input_tokens": len(call.prompt_ids),
            "output_tokens": len(call.ids) if output is None else output,
            "cache_read_input_tokens": call.cached_tokens,
            "cache_creation_input_tokens": 0,
        }


class _Blocks:
    """Content blocks of a stream: one open at a time, of the kind of what comes."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        self._answered = False  # there is more than thinking

    def add(self, parsed: Parsed) -> list[bytes]:
        self._answered = self._answered or bool(parsed.content or parsed.tool_calls)
        out: list[bytes] = []
        if parsed.reasoning:
            out += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._delta({"type": "thinking_delta", "thinking": parsed.reasoning}))
        if parsed.content:
            out += self._switch("text", {"type": "text", "text": ""})
            out.append(self._delta({"type": "text_delta", "text": parsed.content}))
        for tool_call in parsed.tool_calls:
            out += self._close()
            out += self._switch("tool_use", {**_tool_use(tool_call), "input": {}})
            out.append(
                self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(_input(tool_call)).decode()})
            )
        return out

    def end(self) -> list[bytes]:
        if not self._answered:  # an answer without text still has a block
            return [*self._switch("text", {"type": "text", "text": ""}), *self._close()]
        return self._close()

    def _switch(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        out = self._close()
        self._index += 1
        self._open = kind
        return [*out, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def _stop(call: Call) -> dict[str, Any]:
    if call.stop_matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": call.stop_matched}
    return {"stop_reason": _STOP_REASONS[call.finish_reason], "stop_sequence": None}


def _tool_use(tool_call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_call.call_id, "name": tool_call.name}


def _input(tool_call: ToolCall) -> dict[str, Any]:
    return as_object(parse_arguments(tool_call.arguments))
