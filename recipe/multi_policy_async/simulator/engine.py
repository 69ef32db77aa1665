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
"""Rollout servers that sleep: they give ids, log-probs and versions at a set pace, and can be cut by a weight sync."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ..gateway.upstream import Attempt, TokenChunk
from ..trajectory import Version
from .meters import Level, Window
from .scenario import ServingSpec

LETTERS = 26  # ids below are the letters of the simulator's alphabet


def log_prob_of(token_id: int) -> float:
    """Known per token, and exact in float32."""
    return -(token_id + 1) / 64


@dataclass
class Emission:
    """What was sampled for one call, over all its attempts: the truth that the audit compares rows with."""

    planned: int
    limit: int  # what the first attempt was allowed to sample
    ids: list[int] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.ids) == self.planned


class SimulatedEngine:
    """All replicas of one policy, as one pool behind an ideal balancer; an ``Upstream`` of the gateway.

    A sequence takes ``token_s`` per token, however many run beside it, up to ``replicas * slots_per_replica``; what
    comes beyond waits in order. A sync aborts what runs and what waits, as SGLang's ``abort_all`` does.

    Args:
        spec: size and pace.
        seed: of the answers' lengths.
        window: what is measured.
        clock: simulated seconds.
    """

    def __init__(self, spec: ServingSpec, seed: str, window: Window, clock: Callable[[], float]):
        self._spec = spec
        self._random = random.Random(seed)
        self._clock = clock
        self.window = window
        self._free = self.slots = spec.replicas * spec.slots_per_replica
        self._paused = True
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._cuts: dict[str, asyncio.Event] = {}
        self.version = Version(0, 0)
        self.emissions: dict[str, Emission] = {}
        self.busy = Level(window, clock)
        self.queued = Level(window, clock)
        self.calls = 0  # that ended in the window

    async def generate(self, attempt: Attempt) -> AsyncIterator[TokenChunk]:
        """One attempt: a single chunk at its end, or at its cut."""
        call = self._emission(attempt)
        cut = self._cuts[attempt.rid] = asyncio.Event()
        try:
            if await self._take_slot():
                try:
                    with self.busy.one():
                        yield await self._sample(call, cut, attempt)
                finally:
                    self._give_slot()
            else:
                yield TokenChunk([], [], [], "abort")
        finally:
            del self._cuts[attempt.rid]

    async def _sample(self, call: Emission, cut: asyncio.Event, attempt: Attempt) -> TokenChunk:
        version, began, left = self.version, self._clock(), call.planned - len(call.ids)
        try:
            async with asyncio.timeout(left * self._spec.token_s):
                await cut.wait()
            left = min(left, int((self._clock() - began) / self._spec.token_s))
        except TimeoutError:
            pass
        ids = [self._random.randrange(LETTERS) for _ in range(left)]
        if len(call.ids) + left == call.planned and ids:
            ids[-1] = attempt.stop_token_ids[0]
        call.ids += ids
        call.versions += [version] * left
        if call.complete:
            self.calls += self._clock() in self.window
        return TokenChunk(ids, [log_prob_of(i) for i in ids], [version] * left, "stop" if call.complete else "abort")

    async def sync(self, version: Version, seconds: float) -> None:
        """Abort, load new weights, stamp them, resume: verl's order (``checkpoint_engine/base.py``)."""
        self._paused = True
        for cut in list(self._cuts.values()):
            cut.set()
        while self._waiting:
            _answer(self._waiting.popleft(), False)
        await asyncio.sleep(seconds)
        self.version = version
        self._paused = False
        self._grant()

    async def abort(self, rid: str) -> None:
        """End one attempt, if it runs."""
        if rid in self._cuts:
            self._cuts[rid].set()

    async def close(self) -> None:
        """Nothing to release."""

    def _emission(self, attempt: Attempt) -> Emission:
        name, limit = attempt.rid.split("#")[0], attempt.max_new_tokens
        if name not in self.emissions:
            spread = self._spec.response_spread
            length = round(self._spec.response_tokens * self._random.uniform(1 - spread, 1 + spread))
            self.emissions[name] = Emission(min(limit, max(1, length)), limit)
        call = self.emissions[name]
        kept = call.limit - limit  # an attempt that starts again begins with nothing
        del call.ids[kept:], call.versions[kept:]
        return call

    async def _take_slot(self) -> bool:
        """Wait for a slot; ``False``: aborted before there was one."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            with self.queued.one():
                return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._give_slot()
            raise

    def _give_slot(self) -> None:
        self._free += 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._free and not self._paused:
            self._free -= _answer(self._waiting.popleft(), True)


def _answer(turn: asyncio.Future[bool], answer: bool) -> bool:
    """Answer a request that still waits; whether it did."""
    if turn.done():
        return False
    turn.set_result(answer)
    return True
