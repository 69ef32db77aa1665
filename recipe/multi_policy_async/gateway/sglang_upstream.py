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
"""SGLang's ``/generate`` over HTTP, through the model's router; control calls go to the replicas directly."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from ..trajectory import Version
from .upstream import ERROR_TEXT_LIMIT, Attempt, TokenChunk, UpstreamError, UpstreamRefused

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT = aiohttp.ClientTimeout(total=5)
_LOAD_TIMEOUT = aiohttp.ClientTimeout(total=5)
_GONE = (TimeoutError, aiohttp.ClientError, RuntimeError)  # the last: closed, since the model binds anew
_LOAD_PATHS = ("/v1/loads", "/get_load")  # SGLang's newer and older route; one entry per data-parallel rank


class SglangRouterUpstream:
    """One model's servers behind one router.

    Args:
        router_url: e.g. ``http://127.0.0.1:30000``.
        replica_urls: the servers behind it; the router answers control calls with 404.
        unversioned: the version of answers without a usable ``weight_version``: a frozen model's only one; None
            refuses such answers, since rows of a policy in training must be stamped by the engine (invariant 5).
    """

    def __init__(
        self,
        router_url: str,
        replica_urls: Sequence[str],
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
        unversioned: Version | None = None,
    ) -> None:
        self._generate_url = router_url.rstrip("/") + "/generate"
        self._replica_urls = [url.rstrip("/") for url in replica_urls]
        self._unversioned = unversioned
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        # Made at the first use, since a session belongs to the loop that runs it.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                timeout=self._timeout,
                auto_decompress=False,
                read_bufsize=2**23,  # bounds a line: cumulative answers grow with the generation,
            )
        return self._session

    async def generate(self, attempt: Attempt) -> AsyncIterator[TokenChunk]:
        body = orjson.dumps(_request_body(attempt))
        headers = {"content-type": "application/json", "x-request-id": attempt.rid}
        if attempt.routing_key:
            headers["x-smg-routing-key"] = attempt.routing_key
        reader = _AnswerReader(self._unversioned, attempt.prompt_tokens if attempt.images else None)
        try:
            async with self._http().post(self._generate_url, data=body, headers=headers) as response:
                if response.status != 200:
                    _raise_for_status(response.status, await response.content.read(ERROR_TEXT_LIMIT))
                if not attempt.stream:
                    yield reader.chunk(_parse(await response.read()))
                else:
                    async for line in response.content:
                        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                            yield reader.chunk(_parse(data))
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            # ValueError: a line longer than aiohttp's buffer allows.
            raise UpstreamError(f"{type(error).__name__}: {error}") from error
        if reader.finish is None:
            raise UpstreamError("the answer ended without a finish reason")

    async def abort(self, rid: str) -> None:
        await asyncio.gather(*(self._abort_at(url + "/abort_request", rid) for url in self._replica_urls))

    async def _abort_at(self, url: str, rid: str) -> None:
        try:
            async with self._http().post(url, json={"rid": rid}, timeout=_ABORT_TIMEOUT) as response:
                await response.read()
        except _GONE as error:
            # A replica that cannot be reached runs nothing that could reach us.
            logger.debug("abort of %s at %s: %r", rid, url, error)

    async def waiting_requests(self) -> int | None:
        loads = await asyncio.gather(*(self._waiting_at(url) for url in self._replica_urls))
        return None if None in loads else sum(loads)

    async def _waiting_at(self, url: str) -> int | None:
        try:
            for path in _LOAD_PATHS:
                async with self._http().get(url + path, timeout=_LOAD_TIMEOUT) as response:
                    if response.status == 404:
                        continue
                    response.raise_for_status()
                    answer = orjson.loads(await response.read())
                    ranks = answer["loads"] if isinstance(answer, dict) else answer
                    return sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        except (*_GONE, ValueError, KeyError, TypeError) as error:
            logger.debug("the load of %s is not known: %r", url, error)
        return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _request_body(attempt: Attempt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": attempt.input_ids,
        "rid": attempt.rid,
        "stream": attempt.stream,
        "return_logprob": True,
        "sampling_params": {
            **attempt.sampling_params,
            "max_new_tokens": attempt.max_new_tokens,
            "stop_token_ids": list(attempt.stop_token_ids),
            "skip_special_tokens": False,
        },
    }
    if attempt.top_logprobs:
        body["top_logprobs_num"] = attempt.top_logprobs
    if attempt.images:
        body["image_data"] = [f"data:image;base64,{base64.b64encode(image.data).decode()}" for image in attempt.images]
    return body


def _raise_for_status(status: int, text: bytes) -> None:
    message = f"{status}: {text.decode(errors='replace')}"
    # 408, 429 and 499 speak of the server's state, not of the request.
    if 400 <= status < 500 and status not in (408, 429, 499):
        raise UpstreamRefused(message)
    raise UpstreamError(message)


def _parse(data: bytes) -> dict[str, Any]:
    answer = orjson.loads(data)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, dict):
        raise UpstreamError(f"unexpected answer {data[:ERROR_TEXT_LIMIT]!r}")
    return answer


class _AnswerReader:
    """Cumulative answers -> the tokens that are new in each."""

    def __init__(self, unversioned: Version | None, prompt_tokens: int | None) -> None:
        self._unversioned = unversioned
        self._prompt_tokens = prompt_tokens
        self._seen = 0
        self.finish: str | None = None

    def chunk(self, answer: dict[str, Any]) -> TokenChunk:
        if "error" in answer:
            # A stream's 200 is out before SGLang checks the request: this is its 400. What fails later ends otherwise.
            raise UpstreamRefused(f"{answer['error']}")
        try:
            meta = answer["meta_info"]
            triples = meta.get("output_token_logprobs") or []
            ids = answer.get("output_ids") or []
            finish = meta.get("finish_reason")
            if len(triples) != len(ids) or len(ids) < self._seen or (ids and triples[-1][1] != ids[-1]):
                raise UpstreamError(f"{len(ids)} ids, {len(triples)} log-probs after {self._seen} tokens")
            chunk = TokenChunk(
                ids=ids[self._seen :],
                log_probs=[triple[0] for triple in triples[self._seen :]],
                versions=self._versions(meta, len(ids)) if len(ids) > self._seen else [],
                cached_tokens=meta.get("cached_tokens") or 0,
            )
            for alternatives in (meta.get("output_top_logprobs") or [])[self._seen :]:
                chunk.top_logprobs.append([(entry[0], entry[1]) for entry in alternatives or []])
            if finish is not None:
                self.finish = chunk.finish = self._finish(finish)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise UpstreamError(f"unexpected answer: {error!r}") from error
        self._seen = len(ids)
        if finish is not None and self._prompt_tokens is not None and ids:
            self._check_prompt(meta)
        return chunk

    def _check_prompt(self, meta: dict[str, Any]) -> None:
        """A server that makes other tokens of a prompt with images samples what no trainer could compute again."""
        if meta.get("prompt_tokens") != self._prompt_tokens:
            raise UpstreamError(f"the prompt was read as {meta.get('prompt_tokens')} tokens, not {self._prompt_tokens}")

    @staticmethod
    def _finish(finish: dict[str, Any]) -> str:
        kind = finish.get("type")
        if kind == "abort" and (status := finish.get("status_code")):
            # Not our abort: the engine's way to refuse or fail a request after it was accepted.
            _raise_for_status(int(status), str(finish.get("message", "")).encode())
        if kind not in ("stop", "length", "abort"):
            raise UpstreamError(f"unknown finish reason {finish!r}")
        return kind

    def _versions(self, meta: dict[str, Any], length: int) -> list[Version]:
        """Per new token: from the spans of servers that report them (sglang >= 0.5.23), else the answer's version."""
        if spans := meta.get("weight_versions"):
            versions: list[Version] = []
            for span in spans:
                versions += [self._version(span["version"])] * (span["end"] - span["start"])
            if len(versions) == length:
                return versions[self._seen :]
            raise UpstreamError(f"weight_versions cover {len(versions)} of {length} tokens")
        return [self._version(meta.get("weight_version"))] * (length - self._seen)

    def _version(self, text: Any) -> Version:
        try:
            return Version.parse(str(text))
        except ValueError as error:
            if self._unversioned is None:
                raise UpstreamError(f"{error}: rows of a policy in training must be stamped by the engine") from error
            return self._unversioned
