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
"""Prunes the ledger from time to time, if anything was written since."""

import asyncio
import logging
import sqlite3

from .state import IngestState

logger = logging.getLogger(__name__)


class Pruning:
    """Rows become needless in many ways: trained, dropped or recorded ones, a checkpoint more or less, a policy that
    retires or starts again. Whatever it was, the file has changed, or what replay may use has: then it is pruned.

    Args:
        state: whose ledger is pruned (ledger_prune.py), every ``prune_every_s``.
    """

    def __init__(self, state: IngestState):
        self._state = state
        self._seen: tuple[int, dict[str, int]] | None = None  # changes of the file, reach of replay at the last look
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Look from now on; calling it again changes nothing."""
        if self._timer is None and self._running is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._state.spec.prune_every_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._running = asyncio.ensure_future(self._prune_quietly())
        self._running.add_done_callback(self._looked)

    def _looked(self, done: asyncio.Future[None]) -> None:
        self._running = None
        if not done.cancelled() and done.exception() is not None:
            logger.error("a bug: the ledger is pruned no more", exc_info=done.exception())
        else:
            self.start()

    async def _prune_quietly(self) -> None:
        try:
            now = await self._state.serial.on_disk(self._state.ledger.changes), self._replayable()
            if now != self._seen:
                await self.prune()
                self._seen = now  # what others wrote meanwhile, and what was deleted, is looked at once more
        except sqlite3.Error:
            # A full or slow disk shows where rows are committed; a ledger that stays large harms nobody.
            logger.warning("the ledger could not be pruned", exc_info=True)

    async def prune(self) -> int:
        """Prune now, in small steps between other work; returns the rows deleted."""
        state, deleted = self._state, 0
        replayable: dict[str, int] = {}
        steps = state.ledger.prune(replayable)

        async def step() -> int | None:
            # Anew at each step: a restore in between may have brought older rows back into reach.
            replayable.clear()
            replayable.update(self._replayable())
            return await state.serial.on_disk(next, steps, None)

        while (rows := await state.serial.exclusively(step())) is not None:
            deleted += rows
        return deleted

    def _replayable(self) -> dict[str, int]:
        """By policy with replay, the version number of the oldest rows that it may use."""
        reach = {model_id: queue.replay.oldest for model_id, queue in self._state.queues.items() if not queue.retired}
        return {model_id: oldest for model_id, oldest in reach.items() if oldest is not None}

    async def close(self) -> None:
        """Look no more, and wait for a look that is under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
