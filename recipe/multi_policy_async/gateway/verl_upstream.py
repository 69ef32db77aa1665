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
"""verl's ``LLMServerClient`` as an upstream: Ray calls to the rollout servers, balanced by verl's load balancer.

Gives the same rows as the router: ids, log-probs and a version per token. It cannot stream (a server answers when it is
done, so a streaming client gets one delta) nor end an orphan (verl's client names requests itself): an abandoned
attempt runs to its budget. Unpickling the client imports verl and torch, which a gateway with the router never does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from operator import index
from typing import Any

from ..trajectory import Version
from ..vision import decode
from .upstream import Attempt, TokenChunk, UpstreamError, UpstreamRefused

logger = logging.getLogger(__name__)

_FINISH = {"completed": "stop", "stop": "stop", "length": "length", "aborted": "abort", "abort": "abort"}


class VerlClientUpstream:
    """One model's servers behind verl's client.

    Args:
        client: an ``LLMServerClient`` or a subclass. The resume loop of ``FullyAsyncLLMServerClient.generate`` is not
            used: it reports only the oldest and newest version, and sleeps a second per abort; the gateway resumes.
        incarnation: of the binding; verl's versions are numbers only.
        answer_timeout_s: longest wait for an answer, which comes whole.
    """

    def __init__(self, client: Any, incarnation: int, *, answer_timeout_s: float) -> None:
        self._client = client
        single_attempt = next((c for c in type(client).__mro__ if c.__name__ == "LLMServerClient"), type(client))
        self._generate = single_attempt.generate
        self._incarnation = incarnation
        self._answer_timeout_s = answer_timeout_s

    async def generate(self, attempt: Attempt) -> AsyncIterator[TokenChunk]:
        if attempt.top_logprobs:
            raise UpstreamRefused("top_logprobs need gateway.upstream=sglang_router")
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                output = await self._generate(
                    self._client,
                    attempt.rid,
                    prompt_ids=attempt.input_ids,
                    sampling_params={
                        **attempt.sampling_params,
                        "max_new_tokens": attempt.max_new_tokens,
                        "stop_token_ids": list(attempt.stop_token_ids),
                        "logprobs": True,
                    },
                    **({"image_data": [decode(image.data) for image in attempt.images]} if attempt.images else {}),
                )
            chunk = self._chunk(attempt, output)
        except UpstreamError:
            raise
        except Exception as error:
            # Ray raises what the server raised, of any type, or that it died; or the answer is none. Whatever it was,
            # this attempt is over; the call starts again (`gateway_restarts_total`) or ends as a 503, counted there.
            logger.info("attempt %s failed: %r", attempt.rid, error)
            raise UpstreamError(f"{type(error).__name__}: {error}") from error
        yield chunk

    def _chunk(self, attempt: Attempt, output: Any) -> TokenChunk:
        # verl's servers may hand over numbers of other libraries.
        ids = [index(token) for token in output.token_ids]
        log_probs = [None if value is None else float(value) for value in output.log_probs or ()]
        if len(log_probs) != len(ids):
            raise UpstreamError(f"{len(ids)} ids, {len(log_probs)} log-probs")
        finish = _FINISH.get(output.stop_reason or "")
        if finish is None:
            raise UpstreamError(f"unknown stop reason {output.stop_reason!r}")
        if finish == "stop" and len(ids) >= attempt.max_new_tokens and ids[-1] not in attempt.stop_token_ids:
            finish = "length"  # servers that say "completed" for both
        number = output.extra_fields.get("global_steps")
        if ids and number is None:
            raise UpstreamError("the server stamped no global_steps: its version is not set")
        versions = [Version(self._incarnation, index(number))] * len(ids) if ids else []
        return TokenChunk(
            ids=ids,
            log_probs=log_probs,
            versions=versions,
            finish=finish,
            cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )

    async def abort(self, rid: str) -> None:
        """Nothing: see the module's text."""

    async def waiting_requests(self) -> None:
        """verl's client does not tell."""

    async def close(self) -> None:
        """Nothing to release: the servers are the runtime's."""
