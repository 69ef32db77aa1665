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
"""Exchange -> OpenAI response, whole or as its events."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from .call import Exchange
from .metadata import metadata
from .output_parsing import Parsed, ToolCall


class ResponseWriter:
    """Writes one exchange in the form of OpenAI's responses API."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._call = exchange.calls[0]

    def whole(self) -> dict[str, Any]:
        """The body of a non-streamed answer."""
        call = self._call
        output: list[dict[str, Any]] = []
        if call.reasoning:
            output.append(_reasoning(self._id("rs", 0), call.reasoning))
        if call.content or not call.tool_calls:
            output.append(_message(self._id("msg", len(output)), call.content))
        for tool_call in call.tool_calls:
            output.append(_function_call(self._id("fc", len(output)), tool_call))
        return self._response(output, "incomplete" if call.finish_reason == "length" else "completed")

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they become known; an error ends the stream with an ``error`` event."""
        exchange = self._exchange
        items = _Items(self._id)
        begun = self._response([], "in_progress")
        out = [items.event("response.created", response=begun), items.event("response.in_progress", response=begun)]
        async for events in exchange.news():
            for event in events:
                out += items.add(event.parsed)
            if out:
                yield b"".join(out)
                out = []
        if exchange.error is not None:
            error = exchange.error
            yield items.event("error", code=error.code, message=error.message, param=error.param)
            return
        out = items.end()
        whole = self.whole()
        out.append(items.event(f"response.{whole['status']}", response=whole))
        yield b"".join(out)

    def _id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self._exchange.exchange_id}:{index}"

    def _response(self, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
        exchange, call = self._exchange, self._call
        return {
            "id": f"resp_{exchange.exchange_id}",
            "object": "response",
            "created_at": int(exchange.created_at),
            "status": status,
            "model": exchange.model_id,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **exchange.request.told,
            "parallel_tool_calls": exchange.request.parallel_tool_calls,
            "truncation": "disabled",
            "temperature": call.sampling.params.get("temperature"),
            "top_p": call.sampling.params.get("top_p", 1.0),
            "usage": None if status == "in_progress" else self._usage(),
            "metadata": self._metadata(),
        }

    def _metadata(self) -> dict[str, str]:
        """This API's own metadata field, which holds strings: the client's, and where the answer came from."""
        known = metadata(self._exchange)
        return {
            **self._exchange.request.told["metadata"],
            **known,
            "policy_version": ",".join(known["policy_version"] or ()),
        }

    def _usage(self) -> dict[str, Any]:
        call = self._call
        return {
            "input_tokens": len(call.prompt_ids),
            "input_tokens_details": {"cached_tokens": call.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(call.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(call.prompt_ids) + len(call.ids),
        }


class _Items:
    """Output items of a stream: one open at a time, of the kind of what comes."""

    def __init__(self, new_id: Any) -> None:
        self._new_id = new_id
        self._number = 0
        self._index = -1
        self._kind: str | None = None
        self._item_id = ""
        self._text = ""
        self._answered = False  # there is more than reasoning

    def event(self, kind: str, **data: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"

    def add(self, parsed: Parsed) -> list[bytes]:
        self._answered = self._answered or bool(parsed.content or parsed.tool_calls)
        out: list[bytes] = []
        if parsed.reasoning:
            out += self._switch("reasoning")
            self._text += parsed.reasoning
            out.append(self._part("response.reasoning_text.delta", delta=parsed.reasoning))
        if parsed.content:
            out += self._switch("message")
            self._text += parsed.content
            out.append(self._part("response.output_text.delta", delta=parsed.content, logprobs=[]))
        for tool_call in parsed.tool_calls:
            out += self._close() + self._tool_call(tool_call)
        return out

    def end(self) -> list[bytes]:
        if not self._answered:  # an answer without text still has a message
            return self._switch("message") + self._close()
        return self._close()

    def _begin(self, prefix: str) -> None:
        self._index += 1
        self._item_id = self._new_id(prefix, self._index)

    def _part(self, kind: str, **data: Any) -> bytes:
        return self.event(kind, item_id=self._item_id, output_index=self._index, content_index=0, **data)

    def _switch(self, kind: str) -> list[bytes]:
        if self._kind == kind:
            return []
        out = self._close()
        self._kind = kind
        self._begin("msg" if kind == "message" else "rs")
        item = self._item("in_progress")
        item["content"] = []
        out.append(self.event("response.output_item.added", output_index=self._index, item=item))
        out.append(self._part("response.content_part.added", part=_part_of(kind, "")))
        return out

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        kind, text = self._kind, self._text
        done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        more = {"logprobs": []} if kind == "message" else {}
        out = [
            self._part(done, text=text, **more),
            self._part("response.content_part.done", part=_part_of(kind, text)),
            self.event("response.output_item.done", output_index=self._index, item=self._item("completed")),
        ]
        self._kind, self._text = None, ""
        return out

    def _item(self, status: str) -> dict[str, Any]:
        make = _message if self._kind == "message" else _reasoning
        return {**make(self._item_id, self._text), "status": status}

    def _tool_call(self, tool_call: ToolCall) -> list[bytes]:
        self._begin("fc")
        item = _function_call(self._item_id, tool_call)
        at = {"item_id": self._item_id, "output_index": self._index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        arguments = tool_call.arguments
        return [
            self.event("response.output_item.added", output_index=self._index, item=begun),
            self.event("response.function_call_arguments.delta", delta=arguments, **at),
            self.event("response.function_call_arguments.done", arguments=arguments, name=tool_call.name, **at),
            self.event("response.output_item.done", output_index=self._index, item=item),
        ]


def _part_of(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _message(item_id: str, text: str) -> dict[str, Any]:
    content = [_part_of("message", text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    return {"id": item_id, "type": "reasoning", "summary": [], "content": [_part_of("reasoning", text)]}


def _function_call(item_id: str, tool_call: ToolCall) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": tool_call.call_id,
        "name": tool_call.name,
        "arguments": tool_call.arguments,
        "status": "completed",
    }
