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
"""Advantage groups: their key, when they close, and the open tasks they wait for.

A group is closed when all members of its task have a terminal record; that is what "complete" means with agents that
are called only in some workflows.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ..trajectory import Trajectory, Version, WorkflowId


@dataclass(frozen=True)
class RowRef:
    """What the queues know of a row; its arrays stay in the ledger until it is taken."""

    row_id: int
    incarnation: int
    oldest: int
    newest: int
    reward: float
    turns: int = 1  # of its agent in its workflow


@dataclass(frozen=True)
class QueuedGroup:
    """A closed group of one policy."""

    group_id: str
    model_id: str
    agent_id: str
    rows: tuple[RowRef, ...]
    closed_at: float  # seconds of a monotonic clock
    give_backs: int = 0  # trainers that died while they had it
    uses: int = 0  # batches that trained it
    last_step: int = 0  # version that the last of them led to

    @property
    def row_ids(self) -> list[int]:
        return [row.row_id for row in self.rows]

    @property
    def rewards_are_equal(self) -> bool:
        """Whether its members were compared and none is better than another."""
        return len(self.rows) > 1 and len({row.reward for row in self.rows}) == 1

    def parted(self, row_ids: Set[int]) -> "tuple[QueuedGroup, QueuedGroup]":
        """Its rows that are in ``row_ids``, and those that are not."""
        inside = tuple(row for row in self.rows if row.row_id in row_ids)
        outside = tuple(row for row in self.rows if row.row_id not in row_ids)
        return replace(self, rows=inside), replace(self, rows=outside)

    def trained(self, step: int) -> "QueuedGroup":
        """The group after one more batch, which led to version ``step``."""
        return replace(self, uses=self.uses + 1, last_step=step)

    @property
    def oldest(self) -> int:
        """Number of the oldest version of any token in the group."""
        return min(row.oldest for row in self.rows)

    def staleness(self, version: Version) -> int:
        """Version before the step minus the oldest version of any token in the group (invariant 6)."""
        return version.number - self.oldest

    def survives(self, version: Version, lineage: Mapping[int, int]) -> bool:
        """Whether every row was sampled by weights that the trainer's weights descend from."""
        return all(survives(row.incarnation, row.newest, version, lineage) for row in self.rows)


def survives(incarnation: int, newest: int, version: Version, lineage: Mapping[int, int]) -> bool:
    """Whether the weights at ``version`` descend from the ``newest`` ones that sampled a row."""
    return incarnation == version.incarnation or newest <= lineage.get(incarnation, 0)


def group_key(group_by: str, workflow_id: str, trajectory: Trajectory) -> str:
    """Key of a row's advantage group: ``<task>``, ``<task>/<agent>`` or ``<task>/<agent>/<turn>``."""
    task_key = WorkflowId.parse(workflow_id).task_key
    if group_by == "task":
        return task_key
    if group_by == "task_agent":
        return f"{task_key}/{trajectory.agent_id}"
    assert group_by == "task_agent_turn", group_by
    return f"{task_key}/{trajectory.agent_id}/{trajectory.turn}"


@dataclass(frozen=True)
class _OpenGroup:
    model_id: str
    agent_id: str
    rows: tuple[RowRef, ...]


class OpenGroups:
    """Groups of one task whose workflows have not all ended, by (policy, group id)."""

    def __init__(self, groups: Mapping[tuple[str, str], _OpenGroup] | None = None):
        self._groups = dict(groups or {})

    def copy(self) -> "OpenGroups":
        return OpenGroups(self._groups)

    def add(self, model_id: str, group_id: str, agent_id: str, row: RowRef) -> None:
        found = self._groups.get((model_id, group_id), _OpenGroup(model_id, agent_id, ()))
        agent = agent_id if agent_id == found.agent_id else ""  # rows of several agents
        self._groups[model_id, group_id] = _OpenGroup(model_id, agent, (*found.rows, row))

    def without(self, model_id: str) -> "OpenGroups":
        return OpenGroups({key: group for key, group in self._groups.items() if group.model_id != model_id})

    def row_ids(self, model_id: str) -> list[int]:
        return [row.row_id for group in self._groups.values() if group.model_id == model_id for row in group.rows]

    def oldest(self, model_id: str) -> list[int]:
        """Oldest version number of each group of a policy."""
        return [min(row.oldest for row in group.rows) for group in self._groups.values() if group.model_id == model_id]

    def close(self, now: float) -> list[QueuedGroup]:
        return [
            QueuedGroup(group_id, model_id, group.agent_id, group.rows, now)
            for (model_id, group_id), group in self._groups.items()
        ]


@dataclass
class OpenTask:
    """A task whose workflows have not all ended."""

    members: int
    ended: set[int] = field(default_factory=set)  # samples with a terminal record
    groups: OpenGroups = field(default_factory=OpenGroups)

    def closes_with(self, sample: int) -> bool:
        return len(self.ended | {sample}) == self.members


def row_ids(groups: Sequence[QueuedGroup]) -> list[int]:
    """Row ids of ``groups``, in order."""
    return [row_id for group in groups for row_id in group.row_ids]
