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
"""Unfinished work, rebuilt from what has no terminal record and what has no fate in the ledger."""

from collections.abc import Iterable, Mapping, Sequence

from ..trajectory import WorkflowId
from .groups import OpenTask, QueuedGroup, RowRef
from .holding import InFlight
from .ledger import TrainedRow, WaitingRow


def rebuild(
    waiting: Iterable[WaitingRow], open_tasks: dict[str, OpenTask], now: float, give_backs: Mapping[str, int]
) -> list[QueuedGroup]:
    """Put rows of open tasks back into ``open_tasks`` and return the closed groups, in closing order.

    Args:
        waiting: one policy's rows, as ``Ledger.waiting_rows`` orders them.
        open_tasks: open tasks by key; changed.
        now: monotonic clock, in seconds.
        give_backs: trainers that died with a group, by its id.
    """
    closed: dict[str, list[WaitingRow]] = {}
    for row in waiting:
        if row.closed is None:
            open_tasks[row.task_key].groups.add(row.model_id, row.group_id, row.agent_id, _ref(row))
        else:
            closed.setdefault(row.group_id, []).append(row)
    return [_group(group_id, rows, now, give_backs=give_backs.get(group_id, 0)) for group_id, rows in closed.items()]


def rebuild_trained(trained: Iterable[TrainedRow], now: float) -> list[QueuedGroup]:
    """Groups that may be replayed, in the order of ``Ledger.trained_rows``."""
    groups: dict[str, list[TrainedRow]] = {}
    for row in trained:
        groups.setdefault(row.group_id, []).append(row)
    return [
        _group(group_id, rows, now, uses=rows[0].uses, last_step=rows[0].last_step) for group_id, rows in groups.items()
    ]


def _group(group_id: str, rows: Sequence[WaitingRow], now: float, **history: int) -> QueuedGroup:
    return QueuedGroup(group_id, rows[0].model_id, _agent(rows), tuple(_ref(row) for row in rows), now, **history)


def _agent(rows: Sequence[WaitingRow]) -> str:
    agents = {row.agent_id for row in rows}
    return agents.pop() if len(agents) == 1 else ""


def _ref(row: WaitingRow) -> RowRef:
    return RowRef(row.row_id, row.incarnation, row.oldest, row.newest, row.reward, row.turns)


def unfinished(
    open_tasks: Mapping[str, OpenTask], in_flight: Mapping[str, InFlight]
) -> dict[str, tuple[list[str], int]]:
    """Per open task the ids of the workflows to start, as new attempts where there was one, and its members."""
    attempts = {known.place: WorkflowId.parse(name).attempt + 1 for name, known in in_flight.items()}
    work = {}
    for key, task in open_tasks.items():
        first = WorkflowId.parse(f"{key}-s0-a0")
        ids = [
            str(first._replace(sample=sample, attempt=attempts.get((key, sample), 0)))
            for sample in range(task.members)
            if sample not in task.ended
        ]
        work[key] = (ids, task.members)
    return work
