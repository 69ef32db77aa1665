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
"""Calls -> OpenAI completions, whole or as server-sent events."""

import codecs
from collections.abc import AsyncIterator
from typing import Any

import orjson

from .call import Call, Event, Exchange
from .metadata import metadata
from .openai_raising import DONE
from .tokenizer import PolicyTokenizer


class CompletionWriter:
    """Writes one exchange in the form of OpenAI's completions."""

    def __init__(self, exchange: Exchange, tokenizer: PolicyTokenizer) -> None:
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._base = {
            "id": f"cmpl-{exchange.exchange_id}",
            "object": "text_completion",
            "created": int(exchange.created_at),
            "model": exchange.model_id,
        }
        self._logged = [0] * len(exchange.calls)  # tokens whose log-probs were reported
        self._offset = [0] * len(exchange.calls)  # characters before them
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in exchange.calls]

    def whole(self) -> dict[str, Any]:
        """The body of a non-streamed answer."""
        choices = [self._choice(call, call.content, len(call.ids), call.finish_reason) for call in self._exchange.calls]
        return {**self._base, "choices": choices, "usage": self._usage(), "metadata": metadata(self._exchange)}

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they become known; an error ends the stream with an ``error`` event and without ``[DONE]``."""
        exchange = self._exchange
        async for events in exchange.news():
            yield b"".join(map(self._event, events))
        if exchange.error is not None:
            yield b"data: " + orjson.dumps(exchange.error.openai_body()) + b"\n\n"
            return
        usage = self._chunk([], usage=self._usage()) if exchange.request.include_usage else b""
        yield usage + DONE

    def _event(self, event: Event) -> bytes:
        call = self._exchange.calls[event.choice]
        reason = call.finish_reason if event.ended else None
        choice = self._choice(call, event.parsed.content, event.upto, reason)
        return self._chunk([choice], **({"metadata": metadata(self._exchange)} if event.ended else {}))

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + orjson.dumps({**self._base, "choices": choices, **more}) + b"\n\n"

    def _choice(self, call: Call, text: str, upto: int, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(call, upto) if self._exchange.request.logprobs else None
        return {"index": call.choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, call: Call, upto: int) -> dict[str, Any]:
        """The log-probs not reported so far; offsets count from the beginning of the answer's tokens."""
        start, self._logged[call.choice] = self._logged[call.choice], upto
        tokenizer = self._tokenizer
        tokens = [tokenizer.token_text(token_id) for token_id in call.ids[start:upto]]
        offsets = []
        for token_id in call.ids[start:upto]:
            offsets.append(self._offset[call.choice])
            self._offset[call.choice] += len(self._decoders[call.choice].decode(tokenizer.token_bytes(token_id)))
        top = [
            {tokenizer.token_text(token_id): log_prob for log_prob, token_id in alternatives}
            for alternatives in call.alternatives[start:upto]
        ]
        return {
            "tokens": tokens,
            "token_logprobs": call.log_probs[start:upto],
            "top_logprobs": top or None,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, Any]:
        calls, n = self._exchange.calls, self._exchange.request.n
        prompt, completion = sum(len(call.prompt_ids) for call in calls[::n]), sum(len(call.ids) for call in calls)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
