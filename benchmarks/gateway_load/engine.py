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
"""A fake rollout server of fixed latency, one port per model: SGLang's /generate without a model behind it.

    python -m benchmarks.gateway_load.engine '{"latency_s": 0.02, "models": [...], ...}'

The answer repeats the tag of its own prompt behind the name of the model that was asked, so that whoever gets a wrong
one can tell. It is as cheap as it can be, so that what is measured is not this: bare sockets, no tokenizer. It prints
its URLs as one JSON line and ends when its standard input does.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import httptools
import orjson

from recipe.multi_policy_async.tests.fakes.child_process import run, until_parent_leaves


@dataclass(frozen=True)
class Model:
    """How one model answers.

    Attributes:
        before, after: ids that stand before and after the tag in every answer.
        own: the first id of the tag in every prompt that is meant for this model.
    """

    name: str
    before: list[int]
    after: list[int]
    own: int


@dataclass(frozen=True)
class Shape:
    """Where the tag stands in a prompt: ``tag_length`` ids, ``behind`` ids before the end."""

    latency_s: float
    tag_length: int
    behind: int


def log_prob_of(token_id: int) -> float:
    """Known, and exact in float32."""
    return -(token_id % 64) / 64


class Counts:
    """What one model's server was asked."""

    def __init__(self) -> None:
        self.generated = 0
        self.misrouted = 0  # prompts meant for another model


class EngineConnection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, model: Model, shape: Shape, counts: Counts) -> None:
        self._model = model
        self._shape = shape
        self._counts = counts
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()  # a router asks whether HTTP/2 is spoken here

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/generate":
            asyncio.get_running_loop().call_later(self._shape.latency_s, self._send, self._answer())
        elif self._url == b"/counts":
            self._send({"generated": self._counts.generated, "misrouted": self._counts.misrouted})
        else:  # health, model and server info, aborts
            self._send({"model_path": "fake", "weight_version": "0.1"})

    def _answer(self) -> dict[str, Any]:
        body = orjson.loads(self._body)
        prompt, end = body["input_ids"], len(body["input_ids"]) - self._shape.behind
        tag = prompt[end - self._shape.tag_length : end]
        self._counts.generated += 1
        self._counts.misrouted += tag[0] != self._model.own
        ids = [*self._model.before, *tag, *self._model.after]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "0.1",
            "output_token_logprobs": [[log_prob_of(token), token, None] for token in ids],
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _send(self, answer: dict[str, Any]) -> None:
        body = orjson.dumps(answer)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(shape: Shape, models: list[Model]) -> None:
    loop = asyncio.get_running_loop()
    urls = {}
    for model in models:
        counts = Counts()
        server = await loop.create_server(
            lambda model=model, counts=counts: EngineConnection(model, shape, counts), "127.0.0.1", 0, backlog=2048
        )
        urls[model.name] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print(json.dumps(urls), flush=True)
    await until_parent_leaves()


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    run(serve(Shape(**config["shape"]), [Model(**model) for model in config["models"]]))
