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
"""SGLang's HTTP surface over the rollout service, as far as a token-in token-out client and sglang-router use it.

Ids in, ids out: the server holds no tokenizer, like SGLang under verl's default ``skip_tokenizer_init``. While the
server is paused, new generations wait and everything else answers.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .generation_request import GenerationRequest, QueueFull
from .image_prompts import image_bytes
from .rollout_service import GenerationFailed, GenerationRejected, RolloutService, meta_info
from .sampling import InvalidRequest, SamplingParams

_UNSUPPORTED = ("text", "input_embeds", "video_data", "audio_data", "lora_path", "session_params")
_HEALTH_TIMEOUT_S = 20.0
CLIENT_CLOSED_REQUEST = 499  # nginx's code: never sent, only logged


def build_app(service: RolloutService) -> FastAPI:
    """The HTTP application; the caller serves it in the loop in which it calls the service."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(InvalidRequest)
    async def refuse(_: Request, error: InvalidRequest) -> JSONResponse:
        return _error(400, error)

    @app.exception_handler(GenerationFailed)
    async def fail(_: Request, error: GenerationFailed) -> JSONResponse:
        return _error(500, error)

    @app.exception_handler(GenerationRejected)
    @app.exception_handler(QueueFull)
    async def reject(_: Request, error: Exception) -> JSONResponse:
        return _error(503, error)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = _parse(await request.body())
        call = _Call(service, body)
        if body.get("stream"):
            return _EventStream(call)
        return await _or_disconnect(request, call.complete())

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = _parse(await request.body())
        if body.get("abort_all"):
            service.engine.abort_all()
        elif isinstance(body.get("rid"), str) and body["rid"]:
            service.engine.abort(body["rid"])
        else:
            raise InvalidRequest("abort_request needs a rid, or abort_all")
        return Response()

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        return Response("Cache flushed.\n")  # nothing outlives a request

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        if service.engine.paused:
            return Response("paused\n", status_code=503)
        probe = service.generate(f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], SamplingParams(1, temperature=0))
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await probe
        except TimeoutError:
            return Response("no token in time\n", status_code=503)
        return Response()

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": service.model_path,
            "tokenizer_path": service.model_path,
            "is_generation": True,
            "weight_version": service.weight_version,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        engine = service.engine
        return {
            "model_path": service.model_path,
            "served_model_name": service.model_path,
            "version": "multi_policy_async-cpu",
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "skip_tokenizer_init": True,
            "context_length": engine.max_model_len,
            "max_running_requests": engine.max_batch_size,
            "weight_version": service.weight_version,
            "paused": engine.paused,
            "num_running_reqs": engine.num_running,
            "num_waiting_reqs": engine.num_waiting,
        }

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        engine = service.engine
        load = {"dp_rank": 0, "num_running_reqs": engine.num_running, "num_waiting_reqs": engine.num_waiting}
        return {"loads": [load]}

    return app


class _Call:
    """One ``/generate`` body and its answers."""

    def __init__(self, service: RolloutService, body: dict[str, Any]):
        for name in _UNSUPPORTED:
            if body.get(name):
                raise InvalidRequest(f"{name} is not supported: this server takes input_ids")
        if body.get("top_logprobs_num") or body.get("token_ids_logprob") or (body.get("logprob_start_len") or -1) >= 0:
            raise InvalidRequest("only the log-probs of the output tokens are supported")
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InvalidRequest("input_ids must be a list of integers (one request per call)")
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str):
            raise InvalidRequest("rid must be a string")
        self._service = service
        self._with_log_probs = bool(body.get("return_logprob"))
        params = SamplingParams.parse(body.get("sampling_params") or {})
        self._arguments = (rid, ids, params, _images(body.get("image_data")))

    async def complete(self) -> Response:
        return JSONResponse(self._answer(await self._service.generate(*self._arguments)))

    async def events(self) -> AsyncIterator[bytes]:
        """SGLang's server-sent events: cumulative answers, then ``[DONE]``."""
        progress = self._service.stream(*self._arguments)
        try:
            async for request in progress:
                yield b"data: " + json.dumps(self._answer(request), separators=(",", ":")).encode() + b"\n\n"
        except GenerationFailed as error:
            yield b"data: " + json.dumps(_error_body(500, error)).encode() + b"\n\n"
        finally:
            await progress.aclose()
        yield b"data: [DONE]\n\n"

    def _answer(self, request: GenerationRequest) -> dict[str, Any]:
        info = meta_info(request, self._service.weight_version, with_log_probs=self._with_log_probs)
        return {"text": "", "output_ids": request.output_ids[: info["completion_tokens"]], "meta_info": info}


class _EventStream(Response):
    """Streams a call and closes it when the client goes, also while it waits for its first token.

    Starlette's own streaming response notices a lost client, with some servers, only at the next write.
    """

    media_type = "text/event-stream"

    def __init__(self, call: _Call):
        self._call = call
        super().__init__()
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._call.events()
        # The first event decides the status: a request the engine refuses still gets its 400.
        gone = asyncio.ensure_future(_disconnected(receive))
        started = False
        try:
            while True:
                following = asyncio.ensure_future(anext(events, None))
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                    return
                event = following.result()
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event or b"", "more_body": event is not None})
                if event is None:
                    return
        finally:
            gone.cancel()
            await events.aclose()


async def _or_disconnect(request: Request, answer: Any) -> Response:
    """The answer, or nothing when the client goes first; its generation is then aborted."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        gone.cancel()
        work.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _images(given: Any) -> list[bytes]:
    return [image_bytes(image) for image in (given if isinstance(given, list) else [] if given is None else [given])]


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body or b"{}")
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parsed


def _error_body(status: int, error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": status}}


def _error(status: int, error: Exception) -> JSONResponse:
    return JSONResponse(_error_body(status, error), status_code=status)
