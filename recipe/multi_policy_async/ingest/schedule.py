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
"""Who may train now, and may production start another task? Only admission waits for training (invariant 10).

| schedule | trains now | admission waits while |
|---|---|---|
| ``all`` | every policy, at its own pace | any (or all) of them are at their lead |
| ``alternate`` | one policy for some versions, then the next | that one is at its lead |
| ``sync`` | all policies, between rounds | a round is being played or trained: the baseline of other co-trainers |

Policies that cannot train now (frozen, retired, paused, warming up, out of their turn) have no say, else they would
block the others.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..trajectory import Version
from .group_queue import GroupQueue
from .spec import IngestSpec

Queues = Mapping[str, GroupQueue]

_ROUNDING = 1e-9  # of sums of means


class TrainAll:
    """Every policy trains at its own pace.

    Args:
        rule: admit a task while ``any`` or only while ``all`` of the deciding policies are below their lead.
    """

    on_policy = False
    """Whether a policy trains on nothing that older weights sampled."""

    def __init__(self, rule: str):
        self._decide = any if rule == "any" else all

    def in_turn(self, model_id: str, queues: Queues, closed_tasks: int) -> bool:
        """Whether the policy may train now."""
        return True

    def may_take(self, queues: Queues, open_tasks: int, closed_tasks: int) -> bool:
        """Whether batches are given out now."""
        return True

    def has_room(self, queues: Queues, open_tasks: int, closed_tasks: int) -> bool:
        """Whether another task may be started.

        Once no trained policy is left to train nothing is admitted; a job without trained policies, or one whose
        policies warm up, is always admitted.
        """
        deciding = self._deciding(queues, closed_tasks)
        if not deciding:
            waiting = any(queue.can_train and queue.warms_up(closed_tasks) for queue in queues.values())
            return waiting or not any(queue.trained for queue in queues.values())
        return self._decide(queue.has_room(open_tasks) for queue in deciding)

    def trains_at(self, model_id: str, version: Version, queues: Queues, closed_tasks: int) -> bool:
        """A trainer asks for a batch with weights at ``version``; whether another policy has its turn now."""
        return False

    def _deciding(self, queues: Queues, closed_tasks: int) -> Collection[GroupQueue]:
        return [
            queue
            for model_id, queue in queues.items()
            if queue.can_train and not queue.warms_up(closed_tasks) and self.in_turn(model_id, queues, closed_tasks)
        ]


class Alternate(TrainAll):
    """One policy after the other, in the order of their registration.

    Args:
        rule: as above; only one policy decides at a time.
        versions: how many versions a turn lasts.
    """

    def __init__(self, rule: str, versions: int):
        super().__init__(rule)
        self._versions = versions
        self._holder: str | None = None
        self._since: Version | None = None

    def in_turn(self, model_id: str, queues: Queues, closed_tasks: int) -> bool:
        return model_id == self._turn(queues, closed_tasks)

    def trains_at(self, model_id: str, version: Version, queues: Queues, closed_tasks: int) -> bool:
        if model_id != self._turn(queues, closed_tasks):
            return False
        if self._since is None or version.incarnation != self._since.incarnation:
            self._since = version
        elif version.number - self._since.number >= self._versions:
            self._pass_on(queues, closed_tasks)
        return model_id != self._holder

    def _turn(self, queues: Queues, closed_tasks: int) -> str | None:
        """The holder; a turn ends early when its holder cannot train any more."""
        if self._holder is None or not self._is_able(self._holder, queues, closed_tasks):
            self._pass_on(queues, closed_tasks)
        return self._holder

    def _pass_on(self, queues: Queues, closed_tasks: int) -> None:
        order = list(queues)
        start = order.index(self._holder) + 1 if self._holder in queues else 0
        able = [each for each in (*order[start:], *order[:start]) if self._is_able(each, queues, closed_tasks)]
        self._holder, self._since = (able[0] if able else None), None

    @staticmethod
    def _is_able(model_id: str, queues: Queues, closed_tasks: int) -> bool:
        """Who warms up has no turn: the others would wait for it, and lose what they are fed meanwhile."""
        return model_id in queues and queues[model_id].can_train and not queues[model_id].warms_up(closed_tasks)


class Rounds(TrainAll):
    """Play tasks with everybody's newest weights, train everybody, sync, repeat: nothing overlaps.

    A round begins when every policy that can train has asked for a batch that it cannot get, so it has trained, and
    published, all it could. Tasks are started while no policy has its whole batch, and after that for policies that
    lack their smallest one, if what the others get on the way fits their largest. What a task brings is a running mean:
    so what open tasks will bring is counted in advance, and what is missing when they are over is played before
    anybody trains. A policy that is short all the same keeps what it has for the next round, for its weights stay as
    they are; what one that trained has left over, since tasks brought more than their mean, is ``round_over``.
    """

    on_policy = True

    def __init__(self, rule: str):
        super().__init__(rule)
        self._wanted: dict[str, _Wanted] = {}  # by the policies that a round is played for; empty: none is

    def may_take(self, queues: Queues, open_tasks: int, closed_tasks: int) -> bool:
        if open_tasks == 0 and self._wanted and not self._goes_on(self._deciding(queues, closed_tasks), 0):
            self._wanted = {}
        return open_tasks == 0 and not self._wanted

    def has_room(self, queues: Queues, open_tasks: int, closed_tasks: int) -> bool:
        deciding = self._deciding(queues, closed_tasks)
        if not deciding:
            return super().has_room(queues, open_tasks, closed_tasks)
        if not self._wanted and open_tasks == 0 and all(queue.missing is not None for queue in deciding):
            self._wanted = {queue.model_id: _Wanted.by(queue) for queue in deciding}
            for queue in queues.values():
                queue.missing = None
        return self._goes_on(deciding, open_tasks)

    def _goes_on(self, deciding: Collection[GroupQueue], open_tasks: int) -> bool:
        """Whether the round needs more tasks than are open."""
        players = [queue for queue in deciding if queue.model_id in self._wanted]
        if not players:
            return False
        soon = {queue.model_id: len(queue) + queue.groups_per_task * open_tasks for queue in players}
        short = [queue for queue in players if soon[queue.model_id] < self._wanted[queue.model_id].whole - _ROUNDING]
        return len(short) == len(players) or any(self._is_affordable(queue, players, soon) for queue in short)

    def _is_affordable(self, short: GroupQueue, players: Collection[GroupQueue], soon: Mapping[str, float]) -> bool:
        """Whether ``short`` lacks its smallest batch, and the tasks for it bring nobody more than a batch can take."""
        lacking = self._wanted[short.model_id].smallest - soon[short.model_id]
        tasks = lacking / max(short.groups_per_task, _ROUNDING)
        return lacking > _ROUNDING and all(
            soon[queue.model_id] + queue.groups_per_task * tasks <= self._wanted[queue.model_id].largest + _ROUNDING
            for queue in players
        )


@dataclass(frozen=True)
class _Wanted:
    """Groups of the batches that a policy waits for; no more than its queue holds."""

    smallest: int
    whole: int
    largest: int

    @classmethod
    def by(cls, queue: GroupQueue) -> "_Wanted":
        assert queue.missing is not None and queue.capacity is not None, "it trains, and has asked"
        waiting = len(queue)
        whole = waiting + queue.missing
        return cls(*(min(n, queue.capacity) for n in (waiting + queue.needed, whole, queue.largest_batch(whole))))


def make_schedule(spec: IngestSpec) -> TrainAll:
    """The schedule that ``spec`` names."""
    if spec.schedule == "alternate":
        return Alternate(spec.admission, spec.alternate_versions)
    return Rounds(spec.admission) if spec.schedule == "sync" else TrainAll(spec.admission)
