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
"""How many calls of one model are at its servers at once: a fixed limit, or one that follows the servers' load.

    call --> CallSlots (waits here while the limit is reached) --> gate --> servers
                ^ limit
    AdaptiveLimit <-- every few seconds: requests that wait in the servers, whether calls waited here, the model's queue

Too few calls leave the servers' batches empty; too many wait in the servers, where a weight sync cuts them, cached
prefixes are pushed out, and tokens are sampled long before they can be trained. Admission bounds how much is produced;
this bounds how much of it is at one model's servers, so that a model that is called often does not crowd the machine
that it shares with others.

The rule is TCP's: the limit doubles until the first pressure, then grows by a sixteenth per look, and shrinks by a
quarter. Pressure is requests that wait in the servers at two looks in a row (one look may meet a burst). It grows only
if the limit was reached, the servers have room and the model's training queue is empty, or too short for the batch that
its trainer waits for: else more calls would only make rows older.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from .spec import ConcurrencySpec

logger = logging.getLogger(__name__)

_SHRINK = 0.75
_GROW = 1 / 16


class CallSlots:
    """A semaphore whose limit can change, first come first served, calls that were cut before all others.

    Args:
        limit: calls at once; None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_use = 0
        self.was_full = False  # a call had to wait since this was last reset
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, *, first: bool, timeout_s: float) -> None:
        """Wait for a slot; ``release`` gives it back.

        Args:
            first: before all that wait (a call that goes on after a weight sync).
            timeout_s: longest wait.

        Raises:
            TimeoutError: no slot became free in time.
        """
        if self.limit is None or (self.in_use < self.limit and not self._waiting):
            self.in_use += 1
            return
        self.was_full = True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(turn) if first else self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:  # also a cancelled call: the slot it may have got goes to the next, the error goes on
            if turn.done() and not turn.cancelled():  # it got a slot and the end at the same time
                self.in_use -= 1
            elif turn in self._waiting:  # a slot that became free just now has passed it by
                self._waiting.remove(turn)
            self._hand_out()
            raise

    def release(self) -> None:
        self.in_use -= 1
        self._hand_out()

    def set_limit(self, limit: int) -> None:
        """Calls above a smaller limit run to their end."""
        self.limit = limit
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (self.limit is None or self.in_use < self.limit):
            turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self.in_use += 1
            turn.set_result(None)


class AdaptiveLimit:
    """The rule above, without clock or I/O.

    Args:
        spec: bounds; ``max_in_flight`` is set.
    """

    def __init__(self, spec: ConcurrencySpec) -> None:
        assert spec.max_in_flight is not None, "an adaptive limit is bounded"
        self._spec = spec
        self._most = spec.max_in_flight
        self.limit = spec.min_in_flight
        self._waited_before = False
        self._met_pressure = False

    def look(self, *, waiting: int | None, was_full: bool, hungry: bool) -> int:
        """The next limit.

        Args:
            waiting: requests that wait in the model's servers now; None: they did not tell, so nothing changes.
            was_full: calls waited for a slot since the last look.
            hungry: the model's trainer has nothing to train.
        """
        if waiting is None:
            return self.limit
        pressure = waiting > 0 and self._waited_before
        self._waited_before = waiting > 0
        if pressure:
            self._met_pressure = True
            self._waited_before = False  # what waits now was let in by the old limit: look twice again
            self.limit = max(self._spec.min_in_flight, int(self.limit * _SHRINK))
        elif waiting == 0 and was_full and hungry:
            grown = self.limit + max(1, int(self.limit * _GROW)) if self._met_pressure else 2 * self.limit
            self.limit = min(self._most, grown)
        return self.limit


class Limited(Protocol):
    """A served model, as the control loop sees it."""

    model_id: str
    slots: CallSlots
    adaptive: AdaptiveLimit | None

    async def waiting_requests(self) -> int | None:
        """Requests that wait in its servers; None: unknown, or the model is not open."""


async def adapt_limits(
    models: Callable[[], Iterable[Limited]],
    hungry: Callable[[], Awaitable[Mapping[str, bool]]],
    every_s: float,
    on_limit: Callable[[str, int], None],
) -> None:
    """Look at all models with an adaptive limit every ``every_s`` seconds, for ever.

    Args:
        models: those that are bound.
        hungry: model id -> its trainer has nothing to train; models that are not in it are served as fast as they can.
        every_s: between two looks.
        on_limit: told the limit of each look.
    """
    while True:
        await asyncio.sleep(every_s)
        if adaptive := [model for model in models() if model.adaptive is not None]:
            await look_at(adaptive, await hungry(), on_limit)


async def look_at(models: Iterable[Limited], hungry: Mapping[str, bool], on_limit: Callable[[str, int], None]) -> None:
    """One look at ``models``, which have an adaptive limit."""
    models = list(models)
    for model, waiting in zip(models, await asyncio.gather(*(each.waiting_requests() for each in models)), strict=True):
        assert model.adaptive is not None
        was_full, model.slots.was_full = model.slots.was_full, False
        before = model.slots.limit
        limit = model.adaptive.look(waiting=waiting, was_full=was_full, hungry=hungry.get(model.model_id, True))
        if limit != before:
            logger.debug("model %s: %s -> %d calls in flight (%s wait)", model.model_id, before, limit, waiting)
        model.slots.set_limit(limit)
        on_limit(model.model_id, limit)
