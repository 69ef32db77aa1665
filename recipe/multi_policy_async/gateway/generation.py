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
"""Runs one call at a model's servers: waits for the gate, resumes after an abort, retries a dead upstream once."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from ..clock import now
from ..gateway_binding_registry import ModelBinding, ModelState
from .call import Call
from .concurrency import AdaptiveLimit, CallSlots
from .errors import BadRequest, Busy, CallLost, UnsupportedValue, UpstreamFailed
from .gate import ModelGate
from .images import can_send
from .metrics import GatewayMetrics
from .output_parsing import ToolFamily, make_tool_family
from .spec import GatewaySpec
from .tokenizer import PolicyTokenizer
from .upstream import Attempt, TokenChunk, Upstream, UpstreamError, UpstreamRefused, check_chunk

logger = logging.getLogger(__name__)


class _OtherIncarnation(Exception):
    """The model was restored in mid-call: tokens of two lineages cannot be one row."""


class _ImageSampled(UpstreamError):
    """The model sampled an image placeholder: behind it the row could not be computed again."""


class ServedModel:
    """One bound model: its tokenizer, its gate and its servers."""

    def __init__(
        self,
        binding: ModelBinding,
        tokenizer: PolicyTokenizer,
        gate: ModelGate,
        upstream: Upstream,
        spec: GatewaySpec,
        metrics: GatewayMetrics,
    ) -> None:
        self.binding = binding
        self.tokenizer = tokenizer
        self.gate = gate
        self.upstream = upstream
        self.spec = spec
        self._metrics = metrics
        concurrency = binding.concurrency
        self.adaptive = AdaptiveLimit(concurrency) if concurrency is not None and concurrency.adaptive else None
        self.slots = CallSlots(concurrency and (self.adaptive.limit if self.adaptive else concurrency.max_in_flight))
        if self.slots.limit is not None:
            metrics.in_flight_limit(binding.model_id, self.slots.limit)
        self._family: ToolFamily | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._attempts: set[asyncio.Timeout] = set()  # without an end, until other servers take over

    @property
    def model_id(self) -> str:
        return self.binding.model_id

    async def waiting_requests(self) -> int | None:
        """Requests that wait in the model's servers; None while it is not open, or if they do not tell."""
        return await self.upstream.waiting_requests() if self.gate.state == ModelState.OPEN else None

    async def rebind(self, binding: ModelBinding, tokenizer: PolicyTokenizer, upstream: Upstream) -> None:
        """Serve from other servers from now on; attempts at the former ones end and start again."""
        former = self.upstream
        self.binding, self.tokenizer, self.upstream = binding, tokenizer, upstream
        for attempt in self._attempts:  # closing a connection does not wake who waits for it
            attempt.reschedule(asyncio.get_running_loop().time())
        await former.close()

    async def tool_family(self) -> ToolFamily:
        """How this model writes tool calls; the first use may take seconds.

        Raises:
            UnsupportedValue: the configured parser cannot be had.
        """
        if self._family is None:
            name, path = self.binding.tool_parser, self.binding.model_path
            try:
                self._family = await asyncio.to_thread(make_tool_family, name, path, self.tokenizer.response_schema)
            except (ValueError, ImportError) as error:
                logger.error("tool parser %r of model %s: %s", name, self.binding.model_id, error)
                raise UnsupportedValue(
                    f"model {self.binding.model_id} takes no tools: {error}", param="tools"
                ) from error
        return self._family

    async def run(self, call: Call) -> None:
        """Sample one call to its end; tokens go into the call as they come.

        Cancelling this ends the attempt at the servers.

        Raises:
            GatewayError: what the client is to be told.
        """
        failures = 0
        while True:
            attempt = self._attempt(call)
            await self._wait_for_slot(call)
            try:
                await self._wait_open(call)
                finish = await self._sample(call, attempt)
                if self.tokenizer.images is not None and self.tokenizer.images.reserved(call.ids):
                    raise _ImageSampled("the model sampled an image placeholder where there is no image")
            except UpstreamRefused as error:
                raise BadRequest(
                    f"the servers of model {self.binding.model_id} refuse this request: {error}"
                ) from error
            except (UpstreamError, _OtherIncarnation) as error:
                # The old attempt is ended before the next one starts, or two of them could sample at once.
                await self.upstream.abort(attempt.rid)
                failures += 1
                if failures > self.spec.upstream_retries and not isinstance(error, _OtherIncarnation):
                    raise UpstreamFailed(f"the servers of model {self.binding.model_id} failed: {error}") from error
                logger.info("attempt %s failed, starting again: %s", attempt.rid, error)
                self._restart(call, "upstream", error)
                continue
            finally:
                self.slots.release()
            if finish == "abort" and call.ids and call.ids[-1] in call.stop_token_ids:
                finish = "stop"  # the abort came behind the last token
            if finish != "abort":
                call.finish(finish)
                return
            if len(call.ids) >= call.max_new_tokens:
                call.finish("length")
                return
            await self._after_abort(call)

    def _attempt(self, call: Call) -> Attempt:
        rid = f"{call.request_id}#{call.attempts}"
        call.attempts += 1
        ids = call.prompt_ids + call.ids if call.ids else call.prompt_ids
        images = call.prompt.images
        return Attempt(
            rid=rid,
            input_ids=self.tokenizer.images.collapse(ids) if images else ids,
            sampling_params=call.sampling.params,
            max_new_tokens=call.max_new_tokens - len(call.ids),
            stop_token_ids=call.stop_token_ids,
            # Stop strings are looked for here, so tokens must come as they are sampled.
            stream=call.stream or bool(call.stop),
            top_logprobs=call.top_logprobs,
            routing_key=f"{call.workflow_id}:{call.agent_id}",
            images=images,
            prompt_tokens=len(ids),
        )

    async def _sample(self, call: Call, attempt: Attempt) -> str:
        """One attempt; returns ``stop``, ``length`` or ``abort``."""
        finish: str | None = None
        try:
            with self.gate.attempt(resumable=self._resumable(call)):
                async with self._until_rebound(), aclosing(self.upstream.generate(attempt)) as chunks:
                    async for chunk in chunks:
                        check_chunk(chunk)
                        self._check_lineage(call, chunk)
                        if len(call.ids) + len(chunk.ids) > call.max_new_tokens:
                            raise UpstreamError(f"more than the {call.max_new_tokens} tokens that were asked for")
                        finish = chunk.finish
                        if call.accept(chunk):
                            if finish is None:
                                self.abort_later(attempt.rid)
                            return "stop"
        except asyncio.CancelledError:
            self.abort_later(attempt.rid)
            raise
        assert finish is not None, "upstreams end with a finish reason"
        return finish

    @asynccontextmanager
    async def _until_rebound(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as attempt:
                self._attempts.add(attempt)
                try:
                    yield
                finally:
                    self._attempts.discard(attempt)
        except TimeoutError as error:
            raise UpstreamError("others serve the model now") from error

    def _resumable(self, call: Call) -> bool:
        return self.binding.partial_rollout and not call.sampling.stateful

    def _can_go_on(self, call: Call) -> bool:
        """Whether a cut call can go on from its partial output."""
        if not self._resumable(call):
            return False
        return not call.prompt.images or can_send(self, call.prompt_ids + call.ids)

    @staticmethod
    def _check_lineage(call: Call, chunk: TokenChunk) -> None:
        first = call.versions[0] if call.versions else (chunk.versions[0] if chunk.versions else None)
        if first is not None and any(version.incarnation != first.incarnation for version in set(chunk.versions)):
            raise _OtherIncarnation(f"sampled by {first} and then by another incarnation")

    async def _wait_for_slot(self, call: Call) -> None:
        """Wait until fewer calls than the model's limit are in flight; calls that were cut go before new ones."""
        started, timeout_s = now(), self.spec.slot_timeout_s
        try:
            await self.slots.acquire(first=call.attempts > 1, timeout_s=timeout_s)
        except TimeoutError:
            message = f"model {self.model_id} has {self.slots.limit} calls in flight for more than {timeout_s:g} s"
            if call.shown:
                raise CallLost(f"the answer cannot be completed: {message}") from None
            raise Busy(message, retry_after_s=self.spec.retry_after_s, code="model_busy") from None
        self._metrics.slot_wait(self.model_id, now() - started)

    async def _wait_open(self, call: Call) -> None:
        try:
            call.held_s += await self.gate.wait_open(call.workflow_id)
        except (Busy, UpstreamFailed) as error:
            if call.shown:
                raise CallLost(f"the answer cannot be completed: {error.message}") from error
            raise

    async def _after_abort(self, call: Call) -> None:
        """A sync cut the call: go on with its partial output, or start again where the cut lost state."""
        call.resumes += 1
        if call.resumes > self.spec.max_resumes:
            raise CallLost(f"the call was aborted {call.resumes} times")
        if not self._can_go_on(call):
            self._restart(call, "abort", None)
        else:
            self._metrics.resumed(self.binding.model_id)
        if self.gate.state == ModelState.OPEN:
            # The servers were faster than the status message, or somebody else aborted: do not spin.
            await asyncio.sleep(min(1.0, 0.02 * 2 ** min(call.resumes, 6)))

    def _restart(self, call: Call, reason: str, error: Exception | None) -> None:
        if call.shown:
            raise CallLost("the answer was cut and cannot be completed, since a part of it was sent") from error
        lost = call.restart()
        self._metrics.restarted(self.binding.model_id, reason)
        if lost:
            self._metrics.tokens_lost(self.binding.model_id, lost)

    def abort_later(self, rid: str) -> None:
        """End an orphan at the servers without waiting for it."""
        task = asyncio.get_running_loop().create_task(self.upstream.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5)
        await self.upstream.close()
