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
"""The producing side: tasks are admitted, workflows issued, terminal records committed."""

import logging
import time
from collections import Counter

from ..trajectory import WorkflowId, WorkflowRecord
from .arrival import Arrival, check_record, plan_arrival
from .digest import record_digest
from .group_queue import GroupQueue
from .groups import OpenTask
from .holding import InFlight
from .ledger import ISSUED
from .ledger_schema import SUPERSEDED
from .row_codec import encode_arrays
from .state import IngestState

logger = logging.getLogger(__name__)

_IDLE_WARNING = 64  # tasks in a row without a group for a policy that can train


def describe_idle(queue: GroupQueue) -> str:
    """What to tell of a policy that gets no groups."""
    return (
        f"policy {queue.model_id} got no group from the last {queue.idle_tasks} tasks: its agents are not called, or "
        f"fail, or leave fewer than {queue.spec.min_group_size} rows (queue.min_group_size)"
        + (", or get equal rewards (queue.filter_equal_rewards)" if queue.spec.filter_equal_rewards else "")
        + "; it cannot train"
    )


class Intake:
    """Changes ``state`` from the producers' side. Its methods are documented in trajectory_ingestor.py."""

    def __init__(self, state: IngestState):
        self._state = state

    async def admit(self, epoch: int, task: int, members: int, timeout_s: float) -> bool:
        state = self._state
        deadline = state.clock() + timeout_s

        async def write() -> bool:
            if not state.has_room():
                return False  # it went while this waited for the lock
            await state.serial.on_disk(state.ledger.open_task, epoch, task, members)
            state.open.setdefault(WorkflowId(epoch, task, 0).task_key, OpenTask(members))
            return True

        while True:
            changed = state.changes.now()
            if state.has_room() and await state.serial.exclusively(write()):
                return True
            left = deadline - state.clock()
            if left <= 0:
                return False
            await state.changes.wait(changed, left)

    async def issue(self, workflow_id: WorkflowId, members: int, deadline_s: float | None) -> str:
        state = self._state

        async def write() -> str:
            answer = await state.serial.on_disk(state.ledger.issue, workflow_id, members, time.time())
            if answer == ISSUED:
                place = (workflow_id.task_key, workflow_id.sample)
                state.open.setdefault(workflow_id.task_key, OpenTask(members))
                for earlier in [known for known, its in state.in_flight.items() if its.place == place]:
                    del state.in_flight[earlier]
                state.in_flight[str(workflow_id)] = InFlight(
                    *place,
                    deadline=None if deadline_s is None else state.clock() + deadline_s,
                    issued=state.clock(),
                    versions={m: queue.version.number for m, queue in state.queues.items() if queue.version},
                )
            return answer

        return await state.serial.exclusively(write())

    async def ingest(self, record: WorkflowRecord) -> dict[str, int]:
        check_record(record, self._state.queues)
        bodies = [encode_arrays(row) for row in record.trajectories]
        digest = record_digest(record, bodies)

        async def write() -> dict[str, int]:
            if record.workflow_id not in self._state.in_flight:
                return await self._answer_again(record, digest)
            return await self._commit(record, bodies, digest)

        return await self._state.serial.exclusively(write())

    async def _answer_again(self, record: WorkflowRecord, digest: bytes) -> dict[str, int]:
        state = self._state
        found = await state.serial.on_disk(state.ledger.outcome, record.workflow_id)
        if found is None:
            raise ValueError(f"workflow {record.workflow_id} was never issued")
        status, first_digest, answer = found
        if status == SUPERSEDED:
            tokens: Counter[tuple[str, str]] = Counter()
            for row in record.trajectories:
                tokens[row.model_id, SUPERSEDED] += int(row.response_mask.sum())
            await state.serial.on_disk(state.ledger.abandon, record.workflow_id, digest, tokens)
            return {}
        if digest != first_digest:
            raise ValueError(f"workflow {record.workflow_id} has ended as {status!r} with other content")
        return answer

    async def _commit(self, record: WorkflowRecord, bodies: list[bytes], digest: bytes) -> dict[str, int]:
        state = self._state
        key, sample = state.in_flight[record.workflow_id].place
        task = state.open[key]
        arrival = plan_arrival(
            record,
            bodies,
            digest,
            task=task,
            sample=sample,
            queues=state.queues,
            spec=state.spec,
            ended=state.end is not None,
            baselines=state.baselines,
            next_row_id=state.next_row_id,
            next_close=state.next_close,
            now=state.clock(),
        )
        commit = arrival.commit
        await state.serial.on_disk(state.ledger.commit_terminal, commit)
        # Nothing below can fail: memory follows what is on disk.
        state.next_row_id += len(commit.rows)
        state.baselines.update(commit.baselines)
        for row in commit.rows:
            state.accounts[row.trajectory.model_id].accept(row.fate)
        state.workflow_ended(state.in_flight.pop(record.workflow_id))
        task.ended.add(sample)
        task.groups = arrival.groups
        if commit.closed is not None:
            state.next_close += 1
            del state.open[key]
            self._apply_close(arrival)
        state.changes.notify()
        return commit.answer

    def _apply_close(self, arrival: Arrival) -> None:
        for model_id, queue in self._state.queues.items():
            new = arrival.queued.get(model_id, [])
            queue.add(new)
            queue.discard([group for group, _ in arrival.dropped if group.model_id == model_id])
            queue.task_closed(len(new))
            if queue.idle_tasks >= _IDLE_WARNING and queue.idle_tasks.bit_count() == 1:  # again at each doubling
                logger.warning("%s", describe_idle(queue))
        for group, reason in arrival.dropped:
            self._state.accounts[group.model_id].settle_groups(reason, [group])
