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
"""Room for running workflows: a common pool, and beside it some for those that wait for one policy.

    starts --> common slot --its call waits at a closed gate--> slot of that policy, if it has one left
                    ^--------------------the gate opened--------------'

So a paused policy keeps no slots from workflows that do not need it, up to its own number of slots, and what runs is
bounded by the common slots and those of all policies together (invariant 10).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from .failures import describe

logger = logging.getLogger(__name__)


class Slots:
    """Common slots go to workflows in the order in which they ask.

    Args:
        common: workflows that run at once, not counting those that hold a slot of a policy.
        per_policy: workflows that may hold a slot of one policy.
    """

    def __init__(self, common: int, per_policy: int):
        self._free = asyncio.Semaphore(common)
        self._per_policy = per_policy
        self._running: set[str] = set()
        self._blocked: dict[str, str] = {}  # workflow -> the policy whose slot it holds
        self._owed = 0  # workflows that went back to the common pool and took no slot of it yet

    @asynccontextmanager
    async def hold(self, workflow: str) -> AsyncIterator[None]:
        """Run a workflow; waits for a common slot."""
        await self._free.acquire()
        self._running.add(workflow)
        try:
            yield
        finally:
            self._running.remove(workflow)
            if self._blocked.pop(workflow, None) is None:
                self._give_common()

    @property
    def running(self) -> int:
        """Workflows that hold a slot of either kind."""
        return len(self._running)

    @property
    def blocked(self) -> int:
        """Workflows that hold a slot of a policy."""
        return len(self._blocked)

    @property
    def full(self) -> bool:
        """Whether a workflow that starts now has to wait."""
        return self._free.locked()

    def update(self, blocked: Mapping[str, str]) -> None:
        """Move workflows between the pools.

        Args:
            blocked: policy that a workflow waits for, by workflow; others than the running ones do not matter.
        """
        for workflow, policy in list(self._blocked.items()):
            if blocked.get(workflow) != policy:
                del self._blocked[workflow]
                self._owed += 1  # it goes on at once: nobody could make it wait
        taken = Counter(self._blocked.values())
        for workflow, policy in blocked.items():
            if workflow in self._running and workflow not in self._blocked and taken[policy] < self._per_policy:
                self._blocked[workflow] = policy
                taken[policy] += 1
                self._give_common()

    def _give_common(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._free.release()


async def watch_blocked(
    slots: Slots,
    ask: Callable[[float], Awaitable[Mapping[str, str]]],
    after_s: float,
    on_change: Callable[[], None],
) -> None:
    """For ever: while slots are short, ask which workflows wait at a closed gate.

    Args:
        slots: the slots.
        ask: gives, for waits longer than so many seconds, the policy by attempt of a workflow.
        after_s: so much waiting makes a workflow blocked; also the time between two questions.
        on_change: called when slots were freed or taken back.
    """
    while True:
        await asyncio.sleep(after_s)
        if not slots.full and not slots.blocked:
            continue
        try:
            waiting = await ask(after_s)
        except Exception as error:
            # The gateway may be away for a moment; whoever needs it for more than advice will say so.
            logger.info("which workflows are blocked is not known: %s", describe(error))
            continue
        slots.update({without_attempt(workflow): policy for workflow, policy in waiting.items()})
        on_change()


def without_attempt(workflow_id: str) -> str:
    """``e0-t1-s2`` of ``e0-t1-s2-a3``: a new attempt keeps its workflow's slot."""
    return workflow_id.rpartition("-")[0]
