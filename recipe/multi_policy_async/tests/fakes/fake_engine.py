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
"""A rollout server with known outputs, speaking SGLang's /generate, /abort_request and health surface."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[list[int]], list[int]]


def log_prob_of(token_id: int) -> float:
    """The fake's log-prob of a token: known, different per token, exact in float32."""
    return -(token_id % 64) / 64


@dataclass
class FakeEngine:
    """Serves ``script(input_ids)`` token by token.

    Attributes:
        script: the whole answer to a prompt; a resumed attempt gets what is left of the prompt's answer.
        faults: statuses to answer with instead, one per coming request; 0 cuts the connection.
        rows: (rid, ids, finish type) of every attempt that ended, in order.
    """

    script: Script
    version: str = "0.1"
    token_s: float = 0.0
    chunk: int = 1  # tokens per streamed chunk
    faults: list[int] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # tokens after which coming attempts lose their connection
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    rows: list[tuple[str, list[int], str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    prompt_of: dict[str, list[int]] = field(default_factory=dict)
    image_tokens: int = 1  # that every image of a prompt takes
    waiting: int | None = None  # what the load route tells; None: this server has no such route
    load_route: str = "/v1/loads"
    url: str = ""

    async def start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort_request)
        app.router.add_get("/v1/loads", self._load)
        app.router.add_get("/get_load", self._load)
        for path in (
            "/health",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/get_server_info",
            "/health_generate",
        ):
            app.router.add_get(path, self._info)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        await self._runner.cleanup()

    def abort_all(self) -> None:
        """What a weight sync does to running requests."""
        for event in self.running.values():
            event.set()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.version})

    async def _load(self, request: web.Request) -> web.Response:
        if self.waiting is None or request.path != self.load_route:
            raise web.HTTPNotFound
        ranks = [{"dp_rank": 0, "num_waiting_reqs": self.waiting}, {"dp_rank": 1, "num_waiting_reqs": 0}]
        return web.json_response({"loads": ranks} if request.path == "/v1/loads" else ranks)

    async def _abort_request(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.faults and (status := self.faults.pop(0)) >= 0:
            if status == 0:
                request.transport.close()
                return web.Response()
            fault = {"error": {"message": f"fault {status}"}}
            if body["stream"] and status == 400:  # SGLang's refusal of a stream, whose status is out already
                events = f"data: {json.dumps(fault)}\n\ndata: [DONE]\n\n"
                return web.Response(text=events, content_type="text/event-stream")
            return web.json_response(fault, status=status)
        cut = self.cut_after.pop(0) if self.cut_after else -1
        rid = body["rid"]
        abort = self.running[rid] = asyncio.Event()
        ids: list[int] = []
        finish = "abort"
        try:
            answer = self._left_of_answer(rid, body["input_ids"])
            limit = body["sampling_params"]["max_new_tokens"]
            stops = set(body["sampling_params"].get("stop_token_ids") or [])
            response = None
            if body["stream"]:
                response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await response.prepare(request)
            kind: str | None = None
            while kind is None:
                if self.token_s:
                    try:
                        await asyncio.wait_for(abort.wait(), self.token_s)
                    except TimeoutError:
                        pass
                else:
                    await asyncio.sleep(0)
                if abort.is_set():
                    kind = "abort"
                else:
                    ids.append(answer[len(ids)])
                    if ids[-1] in stops:
                        kind = "stop"
                    elif len(ids) >= limit:
                        kind = "length"
                if len(ids) == cut:
                    request.transport.close()
                    return response or web.Response()
                if response is not None and (kind or len(ids) % self.chunk == 0):
                    data = json.dumps(self._answer(rid, body, ids, kind), ensure_ascii=False)
                    await response.write(f"data: {data}\n\n".encode())
            finish = kind
            if response is None:
                return web.json_response(self._answer(rid, body, ids, kind))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            del self.running[rid]
            self.rows.append((rid, ids, finish))

    def _left_of_answer(self, rid: str, input_ids: list[int]) -> list[int]:
        """A resumed attempt's input is the call's prompt and what was sampled: go on from there."""
        call = rid.split("#")[0]
        prompt = self.prompt_of.get(call)
        if prompt is None or input_ids[: len(prompt)] != prompt:
            prompt = self.prompt_of[call] = list(input_ids)
        answer = self.script(prompt)
        sampled = input_ids[len(prompt) :]
        assert answer[: len(sampled)] == sampled, "a resumed attempt must begin with what was sampled"
        return answer[len(sampled) :]

    def _answer(self, rid: str, body: dict[str, Any], ids: list[int], kind: str | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": None if kind is None else {"type": kind},
            "prompt_tokens": len(body["input_ids"]) + len(body.get("image_data", ())) * (self.image_tokens - 1),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[log_prob_of(token), token, None] for token in ids],
        }
        if count := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[log_prob_of(token) - rank, (token + rank) % 256, None] for rank in range(count)] for token in ids
            ]
        return {"text": "", "output_ids": list(ids), "meta_info": meta}
