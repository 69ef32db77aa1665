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
"""Exchange -> OpenAI chat completion, whole or streamed. Both show the same text, ids and log-probs."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from .call import Call, Event, Exchange
from .metadata import metadata
from .output_parsing import ToolCall
from .tokenizer import PolicyTokenizer

DONE = b"data: [DONE]\n\n"


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatCompletionWriter:
    """Writes one exchange in OpenAI's form."""

    def __init__(self, exchange: Exchange, tokenizer: PolicyTokenizer) -> None:
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._base = {
            "id": f"chatcmpl-{exchange.exchange_id}",
            "created": int(exchange.created_at),
            "model": exchange.model_id,
        }

    def whole(self) -> dict[str, Any]:
        """The body of a non-streamed answer."""
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [self._choice(call) for call in self._exchange.calls],
            "usage": self._usage(),
            "metadata": metadata(self._exchange),
        }

    def _choice(self, call: Call) -> dict[str, Any]:
        return {
            "index": call.choice,
            "message": self._message(call),
            "finish_reason": call.finish_reason,
            "logprobs": self._logprobs(call, 0, len(call.ids)) if self._exchange.request.logprobs else None,
        }

    @staticmethod
    def _message(call: Call) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": call.content, "refusal": None}
        if call.tool_calls:
            message["content"] = call.content or None
            message["tool_calls"] = [_tool_call(tool_call) for tool_call in call.tool_calls]
        if call.reasoning:
            message["reasoning_content"] = call.reasoning
        return message

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they become known; what is known already comes in one piece.

        An error after the first event ends the stream with an ``error`` event and without ``[DONE]``.
        """
        exchange = self._exchange
        logged = [0] * len(exchange.calls)
        called = [0] * len(exchange.calls)
        out = [
            self._chunk([{"index": call.choice, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for call in exchange.calls
        ]
        async for events in exchange.news():
            yield b"".join([*out, *(self._event(event, logged, called) for event in events)])
            out = []
        if exchange.error is not None:
            yield b"data: " + orjson.dumps(exchange.error.openai_body()) + b"\n\n"
            return
        if exchange.request.include_usage:
            out.append(self._chunk([], usage=self._usage()))
        out.append(DONE)
        yield b"".join(out)

    def _event(self, event: Event, logged: list[int], called: list[int]) -> bytes:
        call, parsed = self._exchange.calls[event.choice], event.parsed
        delta: dict[str, Any] = {}
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.tool_calls:
            first = called[event.choice]
            called[event.choice] += len(parsed.tool_calls)
            delta["tool_calls"] = [{"index": first + i, **_tool_call(c)} for i, c in enumerate(parsed.tool_calls)]
        choice: dict[str, Any] = {"index": event.choice, "delta": delta, "finish_reason": None}
        if event.ended:
            choice["finish_reason"] = call.finish_reason
        if self._exchange.request.logprobs and event.upto > logged[event.choice]:
            choice["logprobs"] = self._logprobs(call, logged[event.choice], event.upto)
            logged[event.choice] = event.upto
        return self._chunk([choice], **({"metadata": metadata(self._exchange)} if event.ended else {}))

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._base, "object": "chat.completion.chunk", "choices": choices, **more}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        calls = self._exchange.calls
        prompt, completion = len(calls[0].prompt_ids), sum(len(call.ids) for call in calls)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": calls[0].cached_tokens},
        }

    def _logprobs(self, call: Call, start: int, end: int) -> dict[str, Any]:
        content = []
        for index in range(start, end):
            entry = self._logprob_entry(call.ids[index], call.log_probs[index])
            alternatives = call.alternatives[index] if index < len(call.alternatives) else []
            entry["top_logprobs"] = [self._logprob_entry(token, logprob) for logprob, token in alternatives]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _logprob_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._tokenizer.token_text(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token_id))}
