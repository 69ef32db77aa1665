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
"""The ready gate of one model: requests pass, wait for a bounded time, or fail at once.

                 set_status by the model's runtime
    STARTING -> OPEN -> DRAINING -> SYNCING -> OPEN ...   any -> STARTING (the policy is started again)   any -> DOWN
       waits    passes    waits       waits                        waits                                         fails

One gate per model, so that one model's sync is never felt by requests for another (invariant 7).
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager

from ..clock import now
from ..gateway_binding_registry import ModelState
from .errors import Busy, UpstreamFailed
from .metrics import GatewayMetrics


class ModelGate:
    """Holds requests while ``model_id`` is not open, and measures holds and drains."""

    def __init__(self, model_id: str, *, hold_timeout_s: float, retry_after_s: int, metrics: GatewayMetrics) -> None:
        self.model_id = model_id
        self.state = ModelState.STARTING
        self.running = 0  # attempts at the upstream now
        self.bound_to_engine = 0  # those among them that could not be resumed after an abort
        self._waiters: dict[object, tuple[str, float]] = {}  # workflow and since when, by request
        self._hold_timeout_s = hold_timeout_s
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._closed_at: float | None = None

    def set_state(self, state: ModelState) -> None:
        """Move to ``state`` and wake the requests it concerns."""
        former, self.state = self.state, state
        if state == former:
            return
        if former == ModelState.OPEN:
            self._closed_at = now()
            self._metrics.in_flight_at_pause(self.model_id, self.running)
            if self.running == 0:
                self._metrics.drained(self.model_id, 0.0)
        if state == ModelState.OPEN and self._closed_at is not None:
            self._metrics.paused_seconds(self.model_id, now() - self._closed_at)
            self._closed_at = None
        # Waiters of this change go; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiters)

    def waiting_workflows(self, longer_than_s: float) -> Set[str]:
        """Workflows with a request that has waited for longer."""
        latest = now() - longer_than_s
        return {workflow_id for workflow_id, since in self._waiters.values() if since < latest}

    async def wait_open(self, workflow_id: str) -> float:
        """Wait until the model is open.

        Args:
            workflow_id: whose request it is.

        Returns:
            Seconds waited.

        Raises:
            Busy: not open within ``hold_timeout_s``.
            UpstreamFailed: the model is down.
        """
        if self.state == ModelState.OPEN:
            return 0.0
        started, waiter = now(), object()
        self._waiters[waiter] = (workflow_id, started)
        try:
            async with asyncio.timeout(self._hold_timeout_s):
                await self._settled()
        except TimeoutError:
            raise Busy(
                f"model {self.model_id} is {self.state.value} for more than {self._hold_timeout_s:g} s",
                retry_after_s=self._retry_after_s,
                code="model_paused",
            ) from None
        finally:
            del self._waiters[waiter]
            held = now() - started
            self._metrics.held(self.model_id, held)
        if self.state == ModelState.DOWN:
            raise UpstreamFailed(f"model {self.model_id} is down")
        return held

    async def _settled(self) -> None:
        while self.state not in (ModelState.OPEN, ModelState.DOWN):
            await self._changed.wait()

    async def drain(self, timeout_s: float) -> int:
        """Let no new request pass, and wait for the attempts that an abort would cost.

        Returns:
            How many of them still run after ``timeout_s``.
        """
        self.set_state(ModelState.DRAINING)
        deadline = now() + timeout_s
        while self.bound_to_engine and now() < deadline and self.state == ModelState.DRAINING:
            await asyncio.sleep(0.01)
        return self.bound_to_engine

    @contextmanager
    def attempt(self, *, resumable: bool) -> Iterator[None]:
        """Counts one attempt at the upstream."""
        self.running += 1
        self.bound_to_engine += not resumable
        try:
            yield
        finally:
            self.running -= 1
            self.bound_to_engine -= not resumable
            if self.running == 0 and self._closed_at is not None and self.state != ModelState.OPEN:
                self._metrics.drained(self.model_id, now() - self._closed_at)
