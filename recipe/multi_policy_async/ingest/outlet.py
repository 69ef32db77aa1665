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
"""The training side: batches of whole groups are taken, and settled once."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..trajectory import Trajectory, Version
from .baselines import Baseline
from .batch_source import End, Group, ProducerDied, TakenBatch
from .group_queue import GroupQueue
from .groups import QueuedGroup, row_ids
from .holding import holds
from .ledger import FateChange
from .ledger_rows import DamagedRow, DamagedRowsError
from .partners import partner_staleness
from .reasons import DAMAGED, RETIRED, SHUTDOWN, STALE, TRAINED, check_drop_reason
from .state import IngestState

logger = logging.getLogger(__name__)

_DEADLINE_CHECK_S = 0.5


class Outlet:
    """Changes ``state`` from the trainers' side. Its methods are documented in trajectory_ingestor.py."""

    def __init__(self, state: IngestState):
        self._state = state

    async def take(
        self, model_id: str, groups: int, version: Version, timeout_s: float
    ) -> TakenBatch | End | ProducerDied | None:
        state = self._state
        deadline = state.clock() + timeout_s
        queue = state.queue(model_id)
        while True:
            changed = state.changes.now()
            if isinstance(state.end, ProducerDied):
                return state.end
            if not state.is_current(queue):
                return None  # the policy was started again: this trainer is gone
            if queue.retired:
                return End(f"policy {model_id} is retired")
            ended = state.end
            reserving = asyncio.ensure_future(state.serial.exclusively(self._reserve(queue, groups, version)))
            try:
                batch_id, retry_in_s = await asyncio.shield(reserving)
            except asyncio.CancelledError:
                reserving.add_done_callback(lambda done: self._undo_reserve(queue, done))
                raise
            if batch_id:
                batch = await self._read_batch(queue, batch_id)
                if batch is not None:
                    return batch
                continue  # what is left of it waits again
            if isinstance(ended, End):
                return ended
            left = deadline - state.clock()
            if left <= 0:
                return None
            await state.changes.wait(changed, left if retry_in_s is None else min(left, retry_in_s))

    async def hold(self, model_id: str, groups: int, version: Version, batches_left: int, timeout_s: float) -> bool:
        state = self._state
        started = now = state.clock()
        queue = state.queue(model_id)
        queue.batches_left = batches_left
        if queue.moves_to(version, state.clock()):  # workflows that begin while it holds are served by this version
            state.changes.notify()

        def waits() -> bool:
            return state.end is None and self._holds(queue, groups, version, now)

        while held := waits():
            left = started + timeout_s - now
            if left <= 0:
                break
            # Deadlines pass without an event.
            await state.changes.wait(state.changes.now(), min(left, _DEADLINE_CHECK_S))
            now = state.clock()
        queue.held_s += now - started
        return not held

    async def may_publish(self, model_id: str, version: Version, timeout_s: float) -> bool:
        state, queue = self._state, self._state.queue(model_id)
        deadline = state.clock() + timeout_s
        while not isinstance(state.end, ProducerDied):
            changed, now = state.changes.now(), state.clock()
            if state.pin.is_set and queue.published is not None:
                wait_s = _DEADLINE_CHECK_S  # it runs out without an event
            else:
                wait_s = state.stagger.wait_s(model_id, now) if state.end is None else 0.0
            if wait_s == 0:
                break
            if now >= deadline:
                return False
            await state.changes.wait(changed, min(wait_s, deadline - now))
        queue.publishing, queue.published = True, version
        return True

    async def synced(self, model_id: str) -> None:
        self._state.queue(model_id).publishing = False
        self._state.stagger.ended(model_id)
        self._state.changes.notify()

    async def pin_versions(self, seconds: float, timeout_s: float) -> bool:
        state = self._state
        state.pin.set(seconds)
        deadline = state.clock() + timeout_s
        while any(queue.publishing for queue in state.queues.values()):
            left = deadline - state.clock()
            if left <= 0:
                return False
            await state.changes.wait(state.changes.now(), left)
        return True

    async def unpin_versions(self) -> None:
        self._state.pin.lift()
        self._state.changes.notify()

    async def mark_consumed(self, model_id: str, batch_id: str, step: int, incarnation: int) -> None:
        state, queue = self._state, self._state.queue(model_id)

        async def write() -> None:
            groups, again = queue.taken(batch_id), row_ids(queue.replayed(batch_id))
            await state.serial.on_disk(state.ledger.consume, row_ids(groups), incarnation, step, again)
            queue.consumed(batch_id, step)
            state.accounts[model_id].settle_groups(TRAINED, groups)
            state.accounts[model_id].replayed += len(again)
            state.changes.notify()

        await state.serial.exclusively(write())

    async def drop(self, model_id: str, batch_id: str, reason: str) -> None:
        state, queue = self._state, self._state.queue(model_id)
        check_drop_reason(reason)

        async def write() -> None:
            await self._settle(model_id, {reason: queue.taken(batch_id)})
            queue.dropped(batch_id)
            state.changes.notify()

        await state.serial.exclusively(write())

    async def retire(self, model_id: str) -> None:
        state, queue = self._state, self._state.queue(model_id)

        async def settle() -> None:
            waiting = queue.waiting()
            ids = row_ids(waiting) + state.open_row_ids(model_id)
            await state.serial.on_disk(state.ledger.set_fates, [FateChange(ids, RETIRED)])
            queue.retired = True
            queue.publishing = False
            queue.replay.clear()
            state.stagger.forget(model_id)
            queue.discard(waiting)
            state.forget_open_rows(model_id)
            state.accounts[model_id].settle(RETIRED, len(ids))
            state.changes.notify()

        await state.serial.exclusively(settle())

    async def clear(self, model_id: str) -> None:
        state, queue = self._state, self._state.queue(model_id)

        async def settle() -> None:
            waiting = queue.waiting()
            await self._settle(model_id, {SHUTDOWN: waiting})
            queue.discard(waiting)
            state.changes.notify()

        await state.serial.exclusively(settle())

    async def _reserve(self, queue: GroupQueue, groups: int, version: Version) -> tuple[str, float | None]:
        """Drop what may not be trained, move a batch to taken. Returns its id ("": none yet) and when to look again."""
        state = self._state
        if queue.retired or not state.is_current(queue):
            return "", None
        moved = queue.moves_to(version, state.clock())
        passed_on = state.schedule.trains_at(queue.model_id, version, state.queues, state.closed_tasks)
        if moved or passed_on:
            state.changes.notify()
        if not state.may_take(queue):
            return "", None
        ended, on_policy = isinstance(state.end, End), state.schedule.on_policy
        plan = queue.plan_take(groups, version, state.clock(), ended=ended, on_policy=on_policy)
        if not plan.ready:
            queue.holding_since = None
        elif self._still_holds(queue, groups, version):
            return "", _DEADLINE_CHECK_S
        if plan.drops:
            await self._settle(queue.model_id, plan.drops)
        stale = len(plan.drops.get(STALE, ()))
        if warning := queue.stale_watch.took(stale, len(plan.ready), state.workflow_s):
            shares = state.accounts[queue.model_id].stale_shares().items()
            by_turns = ", ".join(f"{share:.0%} of {turns}" for turns, share in shares)
            logger.warning("%s; rows stale so far by turns of their agent: %s", warning, by_turns)
        changed = bool(plan.drops or plan.ready) or queue.missing is None
        batch_id = queue.apply_take(plan, groups)
        if changed:
            state.changes.notify()
        return batch_id, plan.retry_in_s

    def _holds(self, queue: GroupQueue, groups: int, version: Version, now: float) -> bool:
        """Whether a batch should wait; workflows that are issued meanwhile do not count, so that it ends."""
        if queue.batches_left is None:  # its trainer does not ask
            return False
        since = queue.holding_since = now if queue.holding_since is None else queue.holding_since
        left, state = queue.batches_left, self._state
        if holds(queue, groups, version, left, state.open, state.in_flight, now, issued_by=since):
            return True
        queue.holding_since = None
        return False

    def _still_holds(self, queue: GroupQueue, groups: int, version: Version) -> bool:
        """Whether a batch that is there waits for workflows that began after its trainer had asked to hold.

        With ``max_staleness: 0`` all that are in play have.
        """
        now, since = self._state.clock(), queue.holding_since
        if self._state.end is None and self._holds(queue, groups, version, now):
            return True
        queue.held_s += 0.0 if since is None else now - since
        return False

    async def _settle(self, model_id: str, drops: Mapping[str, Sequence[QueuedGroup]]) -> None:
        """Waiting rows get their fate, on disk and in the account."""
        changes = [FateChange(row_ids(groups), reason) for reason, groups in drops.items()]
        await self._state.serial.on_disk(self._state.ledger.set_fates, changes)
        for reason, groups in drops.items():
            self._state.accounts[model_id].settle_groups(reason, groups)

    async def _drop_damaged(self, queue: GroupQueue, batch_id: str, damaged: Sequence[DamagedRow]) -> None:
        """Drop what the ledger cannot give back. The rest waits again: groups without these rows, if still worth it."""
        if not self._state.is_current(queue) or queue.retired:
            await self._return(queue, batch_id)
            return
        lost = {row.row_id for row in damaged}
        drops: defaultdict[str, list[QueuedGroup]] = defaultdict(list)
        rest: list[QueuedGroup] = []
        for group in queue.taken(batch_id):
            gone, left = group.parted(lost)
            if gone.rows:
                drops[DAMAGED].append(gone)
            fate = queue.fate_of(left) if gone.rows and left.rows else None
            (rest if fate is None else drops[fate]).append(left)
        await self._settle(queue.model_id, drops)
        replayed = [group for group in queue.replayed(batch_id) if lost.isdisjoint(group.row_ids)]
        queue.give_back_repaired(batch_id, [group for group in rest if group.rows], replayed)
        for row in damaged:
            logger.error(
                "policy %s trains without row %d of workflow %s, which is damaged in the ledger: %s",
                queue.model_id,
                row.row_id,
                row.workflow_id,
                row.cause,
            )
        self._state.changes.notify()

    async def _return(self, queue: GroupQueue, batch_id: str) -> None:
        """Nobody got this batch: its groups go back to the head of the queue."""
        state = self._state
        if not state.is_current(queue):
            return  # its rows wait in the new queue already
        if queue.retired:
            await self._settle(queue.model_id, {RETIRED: queue.taken(batch_id)})
            queue.dropped(batch_id)
        else:
            queue.give_back(batch_id)
        state.changes.notify()

    def _undo_reserve(self, queue: GroupQueue, reserving: asyncio.Future) -> None:
        """Nobody waits for this batch any more: it must not stay taken."""
        if reserving.cancelled() or reserving.exception() is not None:
            return
        batch_id, _ = reserving.result()
        if batch_id:
            undo = self._state.serial.exclusively(self._return(queue, batch_id))
            self._undoing = asyncio.ensure_future(undo)  # a reference keeps the task alive

    def _group(self, queue: GroupQueue, group: QueuedGroup, rows: tuple[Trajectory, ...]) -> Group:
        baselines = None
        if queue.compares_with_average(group):
            known = self._state.baselines
            baselines = tuple(  # the row's own reward is in it; see Baseline.advantage
                known.get((queue.model_id, row.agent_id), Baseline()).observe(ref.reward, queue.spec.ema_decay)
                for row, ref in zip(rows, group.rows, strict=True)
            )
        return Group(group.group_id, group.agent_id, rows, baselines, group.uses)

    async def _read_batch(self, queue: GroupQueue, batch_id: str) -> TakenBatch | None:
        """``None``: some of it is damaged; what is not waits again."""
        state = self._state
        taken = (*queue.taken(batch_id), *queue.replayed(batch_id))
        try:
            rows = iter(await state.serial.on_disk(state.ledger.read, row_ids(taken)))
            vectors = await state.serial.on_disk(state.ledger.oldest_versions, row_ids(taken))
        except DamagedRowsError as error:
            await state.serial.exclusively(self._drop_damaged(queue, batch_id, error.rows))
            return None
        except BaseException:  # also a cancelled call: a batch that nobody got goes back, the error goes on
            await state.serial.exclusively(self._return(queue, batch_id))
            raise
        return TakenBatch(
            batch_id=batch_id,
            groups=tuple(self._group(queue, group, tuple(next(rows) for _ in group.rows)) for group in taken),
            queue_groups=len(queue),
            stale_shares=state.accounts[queue.model_id].stale_shares(),
            partner_staleness=partner_staleness(queue, vectors, state.queues),
        )
