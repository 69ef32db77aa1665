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

Ingest never waits for a queue; only admission waits. One process owns the ledger and all queues (ingest/state.py); the
producing side is ingest/intake.py, the training side ingest/outlet.py.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .ingest.accounts import Account, model_stats
from .ingest.batch_source import End, ProducerDied, TakenBatch
from .ingest.group_queue import GroupQueue
from .ingest.groups import survives
from .ingest.intake import Intake, describe_idle
from .ingest.ledger import FateChange, WaitingRow
from .ingest.outlet import Outlet
from .ingest.pruning import Pruning
from .ingest.reasons import POISON, ROLLED_BACK
from .ingest.recovery import rebuild, rebuild_trained, unfinished
from .ingest.replay import ReplayPool
from .ingest.spec import IngestSpec, QueueSpec
from .ingest.state import IngestState
from .trajectory import Version, WorkflowId, WorkflowRecord

logger = logging.getLogger(__name__)


class TrajectoryIngestor:
    """Owns the ledger and one queue per policy. All methods are async, and safe to cancel.

    Args:
        ledger_path: SQLite file, made if missing; unfinished work found in it is taken up again.
        spec: the rules that hold for all policies.
        clock: monotonic seconds, for tests and the simulator.
    """

    def __init__(self, ledger_path: str | Path, spec: IngestSpec, *, clock: Callable[[], float] = time.monotonic):
        self._state = IngestState(ledger_path, spec, clock)
        self._intake = Intake(self._state)
        self._outlet = Outlet(self._state)
        self._pruning = Pruning(self._state)
        self._closed = False

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
        restored lineage consumed; closed groups that such weights sampled are ``rolled_back``.
        A group that ``max_give_backs`` trainers died with, and now one more, is ``poison``.

        Args:
            model_id: the policy.
            spec: its queue; ``max_lead_groups`` must be set for a trained policy.
            trained: rows of others are ``recorded``.
            restored: its checkpoint; ``None`` for the initial weights.
            groups_per_task: first guess of how many groups a task feeds to it; learned later.

        Returns:
            The policy's new incarnation.

        Raises:
            ValueError: the checkpoint is not known, or a trained policy has no ``max_lead_groups``.
        """
        state = self._state
        self._pruning.start()
        queue = GroupQueue(model_id, spec, trained=trained, groups_per_task=groups_per_task)

        async def register() -> int:
            incarnation = await state.serial.on_disk(state.ledger.checkpoints.begin_incarnation, model_id, restored)
            queue.lineage = await state.serial.on_disk(state.ledger.checkpoints.lineage, model_id)
            number = 0 if restored is None else restored[1]
            waiting = await state.serial.on_disk(state.ledger.waiting_rows, model_id)
            give_backs = state.queues[model_id].give_backs() if model_id in state.queues else {}
            waiting = await self._without_poison(waiting, give_backs)
            waiting = await self._without_lost(waiting, Version(incarnation, number), queue.lineage)
            accounts = await state.serial.on_disk(Account.from_ledger, state.ledger)
            oldest = ReplayPool(spec, number).oldest
            trained_rows = (
                [] if oldest is None else await state.serial.on_disk(state.ledger.trained_rows, model_id, oldest)
            )
            state.forget_open_rows(model_id)
            queue.refill(
                rebuild(waiting, state.open, state.clock(), give_backs),
                incarnation,
                trained=rebuild_trained(trained_rows, state.clock()),
                number=number,
            )
            state.queues[model_id] = queue
            state.stagger.forget(model_id)
            state.accounts[model_id] = accounts.get(model_id, Account())
            state.changes.notify()
            return incarnation

        return await state.serial.exclusively(register())

    async def _without_poison(self, waiting: list[WaitingRow], give_backs: Mapping[str, int]) -> list[WaitingRow]:
        groups = {group for group, count in give_backs.items() if count > self._state.spec.max_give_backs}
        poison = [row.row_id for row in waiting if row.group_id in groups]
        if poison:
            logger.warning("dropped as poison, trainer after trainer died with them: %s", ", ".join(sorted(groups)))
            await self._state.serial.on_disk(self._state.ledger.set_fates, [FateChange(poison, POISON)])
        return [row for row in waiting if row.group_id not in groups]

    async def _without_lost(
        self, waiting: list[WaitingRow], version: Version, lineage: Mapping[int, int]
    ) -> list[WaitingRow]:
        """Drop closed groups that lost weights sampled, now: waiting for the first take, they could make a full queue
        lose the groups that survive, as ``surplus``."""
        lost = {
            row.group_id
            for row in waiting
            if row.closed is not None and not survives(row.incarnation, row.newest, version, lineage)
        }
        gone = [row.row_id for row in waiting if row.group_id in lost]
        if gone:
            await self._state.serial.on_disk(self._state.ledger.set_fates, [FateChange(gone, ROLLED_BACK)])
        return [row for row in waiting if row.group_id not in lost]

    async def retire(self, model_id: str) -> None:
        """The policy reached its target: it keeps serving, its waiting and later rows count as ``retired``."""
        await self._outlet.retire(model_id)

    async def pause(self, model_id: str, paused: bool = True) -> None:
        """Leave a policy out of the admission decision (down, or out of its turn), or take it in again."""
        self._state.queue(model_id).paused = paused
        self._state.changes.notify()

    # -- production ------------------------------------------------------------------------------------------------

    async def admit(self, epoch: int, task: int, members: int, timeout_s: float) -> bool:
        """Wait for room (ingest/schedule.py) and open a task with ``members`` workflows, which counts from now on.

        Returns:
            ``False`` after ``timeout_s``.
        """
        return await self._intake.admit(epoch, task, members, timeout_s)

    async def starving(self) -> str | None:
        """Why the job should end: a policy got no group from ``idle_tasks_limit`` tasks; ``None``: it should not."""
        found = [queue for queue in self._state.queues.values() if queue.starves]
        return f"{describe_idle(found[0])} (queue.idle_tasks_limit)" if found else None

    async def issue(self, workflow_id: str, members: int, deadline_s: float | None = None) -> str:
        """Write that a workflow of a task with ``members`` workflows is started, before it is.

        Args:
            workflow_id: its derived id.
            members: workflows of its task.
            deadline_s: it will have ended by then; bounds how long policies hold their next version for it.

        Returns:
            ``"issued"``; or ``"terminal"`` if an attempt of this sample has ended already: it must not be run again.

        Raises:
            ValueError: the id has another form, the task has another number of members, or a later attempt exists.
        """
        return await self._intake.issue(WorkflowId.parse(workflow_id), members, deadline_s)

    async def ingest(self, record: WorkflowRecord) -> dict[str, int]:
        """Commit a workflow's terminal record and its rows for all policies in one transaction (invariant 4).

        Returns:
            Accepted rows by policy. The same record again gets the first answer; an attempt that a later one replaced
            gets an empty one and its tokens count as abandoned.

        Raises:
            ValueError: the workflow was never issued, another record ended it, or the record is malformed.
        """
        return await self._intake.ingest(record)

    async def end_of_data(self) -> None:
        """All tasks are used up and every workflow has ended: trainers get what is queued, then ``End``."""
        if self._state.open:
            logger.warning("the data ended with %d tasks open: %s", len(self._state.open), sorted(self._state.open)[:5])
        self._state.end = self._state.end or End("all tasks are used up")
        self._state.changes.notify()

    async def producer_died(self, cause: str) -> None:
        """The workflow driver died: trainers get ``ProducerDied`` at once."""
        self._state.end = ProducerDied(cause)
        self._state.changes.notify()

    # -- training --------------------------------------------------------------------------------------------------

    async def take(
        self, model_id: str, groups: int, version: Version, timeout_s: float
    ) -> TakenBatch | End | ProducerDied | None:
        """Take a batch of whole groups for a trainer whose weights are at ``version``; ``None`` after ``timeout_s``.

        Groups that became stale (invariant 6) or were sampled by lost weights are dropped here. The batch must be
        settled: ``mark_consumed`` or ``drop``. If the trainer dies, its rows wait again when the policy starts again.

        Args:
            model_id: the policy.
            groups: target size of the batch.
            version: version before the step.
            timeout_s: longest wait.

        Raises:
            ValueError: the policy is not registered.
        """
        return await self._outlet.take(model_id, groups, version, timeout_s)

    async def hold(self, model_id: str, groups: int, version: Version, batches_left: int, timeout_s: float) -> bool:
        """With ``on_stale: hold``, wait before a batch for open groups that the next version would make stale.

        Args:
            model_id: the policy.
            groups: target size of the batch.
            version: version before the step.
            batches_left: batches between this one and the next version.
            timeout_s: longest wait.

        Returns:
            ``False`` after ``timeout_s``: ask again. Other policies get ``True`` at once.
        """
        return await self._outlet.hold(model_id, groups, version, batches_left, timeout_s)

    async def may_publish(self, model_id: str, version: Version, timeout_s: float) -> bool:
        """Wait until ``version`` may be published: no pin is set and, with ``stagger``, no other policy syncs.

        A policy's first version after its start waits for nobody: its gate is closed until it is served.

        Returns:
            ``False`` after ``timeout_s``: ask again. ``True``: publish now, and tell by ``synced`` when it is done.
        """
        return await self._outlet.may_publish(model_id, version, timeout_s)

    async def synced(self, model_id: str) -> None:
        """The version that ``may_publish`` let pass is served."""
        await self._outlet.synced(model_id)

    async def pin_versions(self, seconds: float, timeout_s: float) -> bool:
        """Let no policy publish a version for ``seconds``, or until ``unpin_versions``; again: renew it.

        Args:
            seconds: after them the pin is gone by itself.
            timeout_s: longest wait for versions that are being published.

        Returns:
            Whether no policy is publishing any more; ``False`` after ``timeout_s``: ask again.
        """
        return await self._outlet.pin_versions(seconds, timeout_s)

    async def unpin_versions(self) -> None:
        """Let policies publish again."""
        await self._outlet.unpin_versions()

    async def mark_consumed(self, model_id: str, batch_id: str, step: int, incarnation: int) -> None:
        """The batch was trained by the step that leads to version ``step`` of ``incarnation``.

        Raises:
            ValueError: the batch is not taken.
        """
        await self._outlet.mark_consumed(model_id, batch_id, step, incarnation)

    async def drop(self, model_id: str, batch_id: str, reason: str) -> None:
        """The batch must not be trained (again): its rows get ``reason``.

        Raises:
            ValueError: the batch is not taken, or the reason is not in the closed list.
        """
        await self._outlet.drop(model_id, batch_id, reason)

    async def clear(self, model_id: str) -> None:
        """Drop the groups that wait in a policy's queue, as ``shutdown``."""
        await self._outlet.clear(model_id)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def add_checkpoint(self, model_id: str, incarnation: int, step: int, digest: str, path: str) -> None:
        """Commit a checkpoint of a policy, after its files are on disk."""
        checkpoints = self._state.ledger.checkpoints
        await self._state.serial.on_disk(checkpoints.add, model_id, incarnation, step, digest, path)

    async def remove_checkpoint(self, model_id: str, incarnation: int, step: int) -> None:
        """Forget a checkpoint, before its files are deleted.

        Raises:
            ValueError: it is not known.
        """
        await self._state.serial.on_disk(self._state.ledger.checkpoints.remove, model_id, incarnation, step)

    async def checkpoints(self) -> list[tuple[str, int, int, str, str]]:
        """(model id, incarnation, step, path, digest) of what can be restored, by model, oldest first."""
        return await self._state.serial.on_disk(self._state.ledger.checkpoints.all)

    async def ledger_id(self) -> str:
        """What tells this ledger from every other one."""
        return await self._state.serial.on_disk(self._state.ledger.ledger_id)

    async def prune(self) -> int:
        """Delete rows that no checkpoint can need again (ingest/ledger_prune.py); returns how many.

        It is done in small steps, between other work, and every ``prune_every_s`` by itself (ingest/pruning.py).
        """
        return await self._pruning.prune()

    # -- reading ---------------------------------------------------------------------------------------------------

    async def issued_tasks(self) -> dict[int, set[int]]:
        """Tasks started so far, by epoch: the task cursor."""
        return await self._state.serial.on_disk(self._state.ledger.issued_tasks)

    async def unfinished(self) -> dict[str, tuple[list[str], int]]:
        """Work to take up again after a restart: per open task the workflow ids to start, and its members."""
        return unfinished(self._state.open, self._state.in_flight)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Per policy: rows by fate and place, groups by place, lead (ingest/accounts.py:model_stats)."""
        state = self._state
        return {
            model_id: model_stats(queue, state.accounts[model_id], state.open.values())
            | {"staggered_s": state.stagger.waited_s[model_id]}
            for model_id, queue in state.queues.items()
        }

    async def close(self) -> None:
        """Close the ledger; what waits in it is taken up by the next start."""
        if self._closed:
            return
        self._closed = True
        await self._pruning.close()
        await self._state.serial.exclusively(self._state.serial.on_disk(self._state.ledger.close))
        self._state.serial.stop()

    async def stop(self) -> None:
        """``close``, by the name that all parts have."""
        await self.close()
