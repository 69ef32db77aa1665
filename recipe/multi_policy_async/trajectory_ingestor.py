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
"""TrajectoryIngestor: finalized workflows in, whole advantage groups per policy out.

    gateway finalize --> ingest --> ledger: terminal record + rows of all models, one transaction --> ack
                                      | the task's last member closes its groups
                                      v
                     GroupQueue[model_id] (ids) --> take: staleness check, rows read from the ledger --> trainer
                                                                                   mark_consumed <--------'

Ingest never waits for a queue; only admission waits (``wait_for_room``). One process owns the ledger and all queues.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .ingest.accounts import Account, model_stats
from .ingest.admission import has_room
from .ingest.arrival import Arrival, check_record, plan_arrival
from .ingest.batch_source import End, Group, ProducerDied, TakenBatch
from .ingest.digest import record_digest
from .ingest.group_queue import GroupQueue
from .ingest.groups import OpenTask, row_ids
from .ingest.ledger import ISSUED, FateChange, Ledger
from .ingest.ledger_schema import SUPERSEDED
from .ingest.reasons import POISON, RETIRED, TRAINED, check_drop_reason
from .ingest.recovery import rebuild, unfinished
from .ingest.row_codec import encode_arrays
from .ingest.serial import Broadcast, Serial
from .ingest.spec import IngestSpec, QueueSpec
from .trajectory import Version, WorkflowId, WorkflowRecord

logger = logging.getLogger(__name__)


class TrajectoryIngestor:
    """Owns the ledger and one queue per policy. All methods are async; safe to cancel.

    Args:
        ledger_path: SQLite file, made if missing; unfinished work found in it is taken up again.
        spec: the rules that hold for all policies.
        clock: monotonic seconds, for tests and the simulator.
    """

    def __init__(self, ledger_path: str | Path, spec: IngestSpec, *, clock: Callable[[], float] = time.monotonic):
        self._spec = spec
        self._clock = clock
        self._ledger = Ledger(ledger_path, synchronous=spec.synchronous)
        self._serial = Serial()
        self._changes = Broadcast()
        self._closed = asyncio.Event()
        self._queues: dict[str, GroupQueue] = {}
        self._end: End | ProducerDied | None = None
        recovered = self._ledger.recover()
        self._next_row_id = recovered.next_row_id
        self._next_close = recovered.next_close
        self._in_flight = recovered.in_flight
        self._open = {
            key: OpenTask(members, recovered.terminal_samples.get(key, set()))
            for key, members in recovered.open_tasks.items()
        }
        self._accounts = {model: Account.from_counts(counts) for model, counts in self._ledger.counts().items()}
        self._endings: Counter[str] = Counter()

    # -- policies --------------------------------------------------------------------------------------------------

    async def register_policy(
        self,
        model_id: str,
        spec: QueueSpec,
        trained: bool,
        restored: tuple[int, int] | None = None,
        groups_per_task: float = 1.0,
    ) -> int:
        """Start a policy, again after its trainer died, or at its checkpoint ``restored = (incarnation, step)``.

        Batches that an earlier trainer took and did not consume wait again, and so do rows that weights outside the
        restored lineage consumed.

        Returns:
            The policy's new incarnation.

        Raises:
            ValueError: the checkpoint is not known, or a trained policy has no ``max_lead_groups``.
        """
        queue = GroupQueue(model_id, spec, trained=trained, groups_per_task=groups_per_task)

        async def register() -> int:
            incarnation = await self._serial.on_disk(self._ledger.begin_incarnation, model_id, restored)
            queue.lineage = await self._serial.on_disk(self._ledger.lineage, model_id)
            for task in self._open.values():
                task.groups = task.groups.without(model_id)
            waiting = await self._serial.on_disk(self._ledger.waiting_rows, model_id)
            queue.refill(rebuild(waiting, self._open, self._clock()), incarnation)
            self._queues[model_id] = queue
            counts = await self._serial.on_disk(self._ledger.counts)
            self._accounts[model_id] = Account.from_counts(counts.get(model_id, {}))
            self._changes.notify()
            return incarnation

        return await self._serial.exclusively(register())

    async def retire(self, model_id: str) -> None:
        """The policy reached its target: it keeps serving, its waiting and later rows count as ``retired``."""
        queue = self._queue(model_id)

        async def settle() -> None:
            waiting = queue.waiting()
            ids = row_ids(waiting) + [i for task in self._open.values() for i in task.groups.row_ids(model_id)]
            await self._serial.on_disk(self._ledger.set_fates, [FateChange(ids, RETIRED)])
            queue.retired = True
            queue.discard(waiting)
            for task in self._open.values():
                task.groups = task.groups.without(model_id)
            self._accounts[model_id].settle(RETIRED, len(ids))
            self._changes.notify()

        await self._serial.exclusively(settle())

    async def pause(self, model_id: str, paused: bool = True) -> None:
        """Leave a policy out of the admission decision (down, or out of its turn), or take it in again."""
        self._queue(model_id).paused = paused
        self._changes.notify()

    # -- production ------------------------------------------------------------------------------------------------

    async def issue(self, workflow_id: str, members: int) -> str:
        """Write that a workflow of a task with ``members`` workflows is started, before it is.

        Returns:
            ``"issued"``; or ``"terminal"`` if an attempt of this sample has ended already: it must not be run again.

        Raises:
            ValueError: the id has another form, the task has another number of members, or a later attempt exists.
        """
        parsed = WorkflowId.parse(workflow_id)

        async def write() -> str:
            answer = await self._serial.on_disk(self._ledger.issue, parsed, members, time.time())
            if answer == ISSUED:
                self._open.setdefault(parsed.task_key, OpenTask(members))
                place = (parsed.task_key, parsed.sample)
                for earlier in [w for w, p in self._in_flight.items() if p == place]:
                    del self._in_flight[earlier]
                self._in_flight[workflow_id] = place
            return answer

        return await self._serial.exclusively(write())

    async def ingest(self, record: WorkflowRecord) -> dict[str, int]:
        """Commit a workflow's terminal record and its rows for all policies in one transaction (invariant 4).

        Returns:
            Accepted rows by policy. The same record again gets the first answer; an attempt that a later one replaced
            gets an empty one and its tokens count as abandoned.

        Raises:
            ValueError: the workflow was never issued, another record ended it, or the record is malformed.
        """
        check_record(record, self._queues)
        bodies = [encode_arrays(row) for row in record.trajectories]
        digest = record_digest(record, bodies)

        async def write() -> dict[str, int]:
            if record.workflow_id not in self._in_flight:
                return await self._answer_again(record, digest)
            return await self._commit(record, bodies, digest)

        return await self._serial.exclusively(write())

    async def end_of_data(self) -> None:
        """All tasks are used up and every workflow has ended: trainers get what is queued, then ``End``."""
        if self._open:
            logger.warning("the data ended with %d tasks open: %s", len(self._open), sorted(self._open)[:5])
        self._end = self._end or End("all tasks are used up")
        self._changes.notify()

    async def producer_died(self, cause: str) -> None:
        """The workflow driver died: trainers get ``ProducerDied`` at once."""
        self._end = ProducerDied(cause)
        self._changes.notify()

    async def admit(self, epoch: int, task: int, members: int, timeout_s: float) -> bool:
        """Wait for room and open a task at once, so that its groups count in the next decision.

        Returns:
            ``False`` after ``timeout_s``.
        """
        if not await self.wait_for_room(timeout_s):
            return False
        key = WorkflowId(epoch, task, 0).task_key

        async def write() -> None:
            await self._serial.on_disk(self._ledger.open_task, epoch, task, members)
            self._open.setdefault(key, OpenTask(members))

        await self._serial.exclusively(write())
        return True

    async def has_room(self) -> bool:
        """Whether another task may be started now."""
        return has_room(self._queues.values(), len(self._open), self._spec.admission)

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until another task may be started; ``False`` after ``timeout_s``."""
        deadline = self._clock() + timeout_s
        while not await self.has_room():
            if self._clock() >= deadline:
                return False
            await self._changes.wait(self._changes.now(), deadline - self._clock())
        return True

    # -- training --------------------------------------------------------------------------------------------------

    async def take(
        self, model_id: str, groups: int, version: Version, timeout_s: float
    ) -> TakenBatch | End | ProducerDied | None:
        """Take a batch of whole groups for a trainer whose weights are at ``version``; ``None`` after ``timeout_s``.

        Groups that became stale (invariant 6) or were sampled by lost weights are dropped here.

        Args:
            model_id: the policy.
            groups: target size of the batch.
            version: version before the step.
            timeout_s: longest wait.

        Raises:
            ValueError: the policy is not registered.
        """
        deadline = self._clock() + timeout_s
        queue = self._queue(model_id)
        while True:
            changed = self._changes.now()
            if isinstance(self._end, ProducerDied):
                return self._end
            if self._queues[model_id] is not queue:
                return None  # the policy was started again: this trainer is gone
            if queue.retired:
                return End(f"policy {model_id} is retired")
            reserving = asyncio.ensure_future(self._serial.exclusively(self._reserve(queue, groups, version)))
            try:
                batch_id, retry_in_s = await asyncio.shield(reserving)
            except asyncio.CancelledError:
                reserving.add_done_callback(lambda done: self._undo_reserve(queue, done))
                raise
            if batch_id:
                return await self._read_batch(queue, batch_id)
            if isinstance(self._end, End):
                return self._end
            left = deadline - self._clock()
            if left <= 0:
                return None
            await self._changes.wait(changed, left if retry_in_s is None else min(left, retry_in_s))

    async def mark_consumed(self, model_id: str, batch_id: str, step: int, incarnation: int) -> None:
        """The batch was trained by ``step`` of ``incarnation``.

        Raises:
            ValueError: the batch is not taken.
        """
        queue = self._queue(model_id)

        async def write() -> None:
            ids = row_ids(queue.taken(batch_id))
            await self._serial.on_disk(self._ledger.consume, ids, incarnation, step)
            queue.consumed(batch_id)
            self._accounts[model_id].settle(TRAINED, len(ids))
            self._changes.notify()

        await self._serial.exclusively(write())

    async def drop(self, model_id: str, batch_id: str, reason: str) -> None:
        """The batch must not be trained (again): its rows get ``reason``.

        Raises:
            ValueError: the batch is not taken, or the reason is not in the closed list.
        """
        queue = self._queue(model_id)
        check_drop_reason(reason)

        async def write() -> None:
            ids = row_ids(queue.taken(batch_id))
            await self._serial.on_disk(self._ledger.set_fates, [FateChange(ids, reason)])
            queue.dropped(batch_id)
            self._accounts[model_id].settle(reason, len(ids))
            self._changes.notify()

        await self._serial.exclusively(write())

    async def give_back(self, model_id: str, batch_id: str) -> None:
        """The step failed: the groups return to the head of the queue, or are ``poison`` after too many times.

        Raises:
            ValueError: the batch is not taken.
        """
        await self._serial.exclusively(self._give_back(self._queue(model_id), batch_id, failed=True))

    async def add_checkpoint(self, model_id: str, incarnation: int, step: int, digest: str, path: str) -> None:
        """Commit a checkpoint of a policy, after its files are on disk."""
        await self._serial.on_disk(self._ledger.add_checkpoint, model_id, incarnation, step, digest, path)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def issued_tasks(self) -> dict[int, set[int]]:
        """Tasks started so far, by epoch."""
        return await self._serial.on_disk(self._ledger.issued_tasks)

    async def unfinished(self) -> dict[str, tuple[list[str], int]]:
        """Work to take up again after a restart: per open task the workflow ids to start, and its members."""
        return unfinished(self._open, self._in_flight)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Per policy: rows by fate and place, groups by place, lead (ingest/accounts.py)."""
        return {
            model_id: model_stats(queue, self._accounts[model_id], self._open.values())
            for model_id, queue in self._queues.items()
        }

    async def workflow_stats(self) -> dict[str, Any]:
        """Open tasks, workflows in flight and endings by status, of this process."""
        return {
            "open_tasks": len(self._open),
            "in_flight": len(self._in_flight),
            "endings": dict(self._endings),
        }

    async def close(self) -> None:
        """Close the ledger; what waits in it is taken up by the next start."""
        if self._closed.is_set():
            return
        await self._serial.exclusively(self._serial.on_disk(self._ledger.close))
        self._serial.stop()
        self._closed.set()

    stop = close

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _answer_again(self, record: WorkflowRecord, digest: bytes) -> dict[str, int]:
        found = await self._serial.on_disk(self._ledger.outcome, record.workflow_id)
        if found is None:
            raise ValueError(f"workflow {record.workflow_id} was never issued")
        status, first_digest, answer = found
        if status == SUPERSEDED:
            tokens: Counter[tuple[str, str]] = Counter()
            for row in record.trajectories:
                tokens[row.model_id, SUPERSEDED] += int(row.response_mask.sum())
            await self._serial.on_disk(self._ledger.abandon, tokens)
            return {}
        if digest != first_digest:
            raise ValueError(f"workflow {record.workflow_id} has ended as {status!r} with other content")
        return answer

    async def _commit(self, record: WorkflowRecord, bodies: list[bytes], digest: bytes) -> dict[str, int]:
        key, sample = self._in_flight[record.workflow_id]
        task = self._open[key]
        arrival = plan_arrival(
            record,
            bodies,
            digest,
            task=task,
            sample=sample,
            queues=self._queues,
            spec=self._spec,
            ended=self._end is not None,
            next_row_id=self._next_row_id,
            next_close=self._next_close,
            now=self._clock(),
        )
        commit = arrival.commit
        await self._serial.on_disk(self._ledger.commit_terminal, commit)
        # Nothing below can fail: memory follows what is on disk.
        self._next_row_id += len(commit.rows)
        for row in commit.rows:
            self._accounts[row.trajectory.model_id].accept(row.fate)
        del self._in_flight[record.workflow_id]
        self._endings[record.status] += 1
        task.ended.add(sample)
        task.groups = arrival.groups
        if commit.closed is not None:
            self._next_close += 1
            del self._open[key]
            self._apply_close(arrival)
            self._changes.notify()
        return commit.answer

    def _apply_close(self, arrival: Arrival) -> None:
        for model_id, queue in self._queues.items():
            new = arrival.queued.get(model_id, [])
            queue.add(new)
            queue.discard([group for group, _ in arrival.dropped if group.model_id == model_id])
            queue.task_closed(len(new))
        for group, reason in arrival.dropped:
            self._accounts[group.model_id].settle(reason, len(group.rows))

    async def _reserve(self, queue: GroupQueue, groups: int, version: Version) -> tuple[str, float | None]:
        if queue.retired:
            return "", None
        plan = queue.plan_take(groups, version, self._clock(), ended=isinstance(self._end, End))
        if plan.drops:
            changes = [FateChange(row_ids(dropped), reason) for reason, dropped in plan.drops.items()]
            await self._serial.on_disk(self._ledger.set_fates, changes)
            for change in changes:
                self._accounts[queue.model_id].settle(change.fate, len(change.row_ids))
        moved = queue.moves(version) or bool(plan.drops or plan.ready)
        batch_id = queue.apply_take(plan, groups, version)
        if moved:
            self._changes.notify()
        return batch_id, plan.retry_in_s

    async def _give_back(self, queue: GroupQueue, batch_id: str, *, failed: bool) -> None:
        groups = [group.given_back() if failed else group for group in queue.taken(batch_id)]
        reason = RETIRED if queue.retired else POISON
        again = [] if queue.retired else [g for g in groups if g.give_backs <= self._spec.max_give_backs]
        gone = row_ids([group for group in groups if group not in again])
        if gone:
            await self._serial.on_disk(self._ledger.set_fates, [FateChange(gone, reason)])
            self._accounts[queue.model_id].settle(reason, len(gone))
        queue.give_back(batch_id, again)
        self._changes.notify()

    def _undo_reserve(self, queue: GroupQueue, reserving: asyncio.Future) -> None:
        """Nobody waits for this batch any more: it must not stay taken."""
        if reserving.cancelled() or reserving.exception() is not None:
            return
        batch_id, _ = reserving.result()
        if batch_id:
            undo = self._serial.exclusively(self._give_back(queue, batch_id, failed=False))
            self._undoing = asyncio.ensure_future(undo)  # a reference keeps the task alive

    async def _read_batch(self, queue: GroupQueue, batch_id: str) -> TakenBatch:
        taken = queue.taken(batch_id)
        try:
            rows = iter(await self._serial.on_disk(self._ledger.read, row_ids(taken)))
        except BaseException:
            await self._serial.exclusively(self._give_back(queue, batch_id, failed=False))
            raise
        return TakenBatch(
            batch_id=batch_id,
            groups=tuple(
                Group(group.group_id, group.agent_id, tuple(next(rows) for _ in group.rows)) for group in taken
            ),
            queue_groups=len(queue),
            dropped=dict(self._accounts[queue.model_id].dropped),
        )

    def _queue(self, model_id: str) -> GroupQueue:
        if model_id not in self._queues:
            known = ", ".join(sorted(self._queues)) or "none"
            raise ValueError(f"policy {model_id!r} is not registered; registered: {known}")
        return self._queues[model_id]
