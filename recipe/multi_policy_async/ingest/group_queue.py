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
"""One policy's queue of closed groups, in memory: ids only, rows are read from the ledger when they are taken.

Planning (``plan_*``, ``surplus_with``) changes nothing; the ingestor commits a plan to the ledger, then applies it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..trajectory import Version
from .groups import QueuedGroup
from .reasons import FILTERED, GROUP_TOO_SMALL, ROLLED_BACK, ROUND_OVER, STALE
from .replay import ReplayPool
from .spec import QueueSpec
from .stale_watch import StaleWatch

_EMA = 0.9  # weight of the past in the running number of groups that a task feeds to a policy


@dataclass
class TakePlan:
    """``ready`` groups to hand out (empty: keep waiting) and the groups to drop on the way, by reason."""

    ready: list[QueuedGroup] = field(default_factory=list)
    replayed: list[QueuedGroup] = field(default_factory=list)  # trained before, to fill up ``ready``
    drops: dict[str, list[QueuedGroup]] = field(default_factory=dict)
    missing: int = 0  # groups short of the target
    needed: int = 0  # groups short of the smallest batch
    retry_in_s: float | None = None  # when waiting longer changes the answer by itself


@dataclass(frozen=True)
class _Taken:
    groups: tuple[QueuedGroup, ...]
    replayed: tuple[QueuedGroup, ...]
    credit: int  # groups that count against the lead: at most the target, so that large batches cannot block admission


class GroupQueue:
    """Waiting, taken and recently consumed groups of one policy, and its lead over training.

    Args:
        model_id: the policy.
        spec: its queue configuration.
        trained: whether it is trained at all.
        groups_per_task: first guess of how many groups a task feeds to it.
    """

    def __init__(self, model_id: str, spec: QueueSpec, *, trained: bool, groups_per_task: float = 1.0):
        if trained and spec.max_lead_groups is None:
            raise ValueError(f"policy {model_id}: queue.max_lead_groups is not set and was not derived")
        self.model_id = model_id
        self.spec = spec
        self.trained = trained
        self.retired = False
        self.paused = False
        self.lineage: dict[int, int] = {}
        self.groups_per_task = groups_per_task
        self.replay = ReplayPool(spec)
        self.stale_watch = StaleWatch(model_id, spec.max_staleness, spec.on_stale == "hold")
        self._registration = 0
        self._waiting: deque[QueuedGroup] = deque()
        self._taken: dict[str, _Taken] = {}
        self.missing: int | None = None  # groups that the trainer's waiting call lacks; None: it does not wait
        self.needed = 0  # of these, groups without which it trains nothing at all
        self.version: Version | None = None  # of the trainer's newest take
        self.batches_left: int | None = None  # of its version, after the next; None: its trainer does not ask to hold
        self.holding_since: float | None = None  # workflows that are issued later hold it no longer
        self.held_s = 0.0
        self.publishing = False  # it may be sending a version to its servers
        self.published: Version | None = None  # newest version that it was allowed to publish
        self.idle_tasks = 0  # closed in a row without a group for it
        self._consumed_in_version = 0
        self._batches = 0

    # -- sizes -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int | None:
        """Groups that may wait (``surplus_with``); ``None`` for a frozen policy, which has no queue."""
        return self.spec.max_queue_groups or self.spec.max_lead_groups

    @property
    def waiting_rows(self) -> int:
        return sum(len(group.rows) for group in self._waiting)

    @property
    def taken_rows(self) -> int:
        return sum(len(group.rows) for taken in self._taken.values() for group in taken.groups)

    @property
    def taken_groups(self) -> int:
        return sum(len(taken.groups) for taken in self._taken.values())

    @property
    def can_train(self) -> bool:
        """Whether admission looks at this policy."""
        return self.trained and not self.retired and not self.paused

    @property
    def newest_version(self) -> int | None:
        """Number of the newest version that is served, or on its way; ``None``: not known yet."""
        known = [version for version in (self.version, self.published) if version is not None]
        return max(known).number if known else None

    @property
    def state(self) -> str:
        """``frozen``, ``retired``, ``paused`` or ``training``."""
        if not self.trained:
            return "frozen"
        return "retired" if self.retired else "paused" if self.paused else "training"

    def warms_up(self, closed_tasks: int) -> bool:
        """Whether it is too early for this policy to train."""
        return closed_tasks < self.spec.start_after_tasks

    def lead(self, open_tasks: int) -> float:
        """Groups that production is ahead: expected from open tasks, queued, taken, and trained since the last version.

        The last term is verl's meaning (``fully_async_rollouter.py:staleness_samples`` is reset at a weight sync): a
        group in training still runs ahead of the weights that are served.
        """
        expected = self.groups_per_task * open_tasks
        taken = sum(taken.credit for taken in self._taken.values())
        return expected + len(self._waiting) + taken + self._consumed_in_version

    def has_room(self, open_tasks: int) -> bool:
        assert self.spec.max_lead_groups is not None
        return self.lead(open_tasks) < self.spec.max_lead_groups

    # -- in --------------------------------------------------------------------------------------------------------

    def surplus_with(self, new: Sequence[QueuedGroup]) -> list[QueuedGroup]:
        """Oldest groups that do not fit any more once ``new``, those of one task, are added.

        Where the lead is the bound, a task is whole: it was started below the lead, whatever it brings beyond.
        """
        candidates = [*self._waiting, *new]
        most = self.spec.max_queue_groups or (self.capacity or 0) - 1 + len(new)
        return candidates[: max(0, len(candidates) - most)]

    def add(self, new: Sequence[QueuedGroup]) -> None:
        self._waiting.extend(new)

    def discard(self, groups: Sequence[QueuedGroup]) -> None:
        gone = {group.group_id for group in groups}
        self._waiting = deque(group for group in self._waiting if group.group_id not in gone)

    def task_closed(self, groups: int) -> None:
        """Learn how many groups a task feeds to this policy."""
        self.groups_per_task = _EMA * self.groups_per_task + (1 - _EMA) * groups
        self.idle_tasks = 0 if groups or not self.can_train else self.idle_tasks + 1

    @property
    def starves(self) -> bool:
        """Whether it can train and got no group for so long that the job should end."""
        limit = self.spec.idle_tasks_limit
        return self.can_train and limit is not None and self.idle_tasks >= limit

    def fate_of(self, group: QueuedGroup) -> str | None:
        """Why a closed group is not worth training; ``None``: it is."""
        small = len(group.rows) < self.spec.min_group_size
        if small and self.spec.on_small_group == "drop":
            return GROUP_TOO_SMALL
        if not small and self.spec.filter_equal_rewards and group.rewards_are_equal:
            return FILTERED
        return None

    def compares_with_average(self, group: QueuedGroup) -> bool:
        """Whether a group's rows are compared with a moving average instead of with each other."""
        return self.spec.on_small_group == "ema" and len(group.rows) < self.spec.min_group_size

    # -- out -------------------------------------------------------------------------------------------------------

    def largest_batch(self, target: int) -> int:
        """Groups that a batch of ``target`` groups may have if more wait."""
        return max(target, self.spec.max_batch_groups or target)

    def plan_take(self, target: int, version: Version, now: float, *, ended: bool, on_policy: bool = False) -> TakePlan:
        """Choose the groups with the oldest tokens that may be trained at ``version``.

        Groups of long workflows close late: in closing order they would pass ``max_staleness`` behind younger ones.

        Args:
            target: groups of a batch.
            version: before the step.
            now: monotonic seconds.
            ended: no more groups will come.
            on_policy: nothing that older weights sampled is trained, whatever ``max_staleness`` says.
        """
        plan = TakePlan()
        bound, too_old = (0, ROUND_OVER) if on_policy else (self.spec.max_staleness, STALE)
        most = self.largest_batch(target)
        ready: list[QueuedGroup] = []
        for group in sorted(self._waiting, key=lambda group: group.oldest):
            if not group.survives(version, self.lineage):
                plan.drops.setdefault(ROLLED_BACK, []).append(group)
            elif bound is not None and group.staleness(version) > bound:
                plan.drops.setdefault(too_old, []).append(group)
            elif fate := self.fate_of(group):  # it was queued by the rules of a job that has ended
                plan.drops.setdefault(fate, []).append(group)
            elif len(ready) < most:
                ready.append(group)
        minimum = min(self.spec.min_batch_groups or target, target)
        if not ready:
            plan.missing, plan.needed = target, minimum
            return plan
        waited = now - min(group.closed_at for group in ready)
        replayed = self.replay.choose(len(ready), target, version, self.lineage) if self.replay.enabled else []
        enough = len(ready) + len(replayed) >= minimum
        if len(ready) >= target or ended or (enough and waited >= self.spec.coalesce_s):
            plan.ready, plan.replayed = ready, replayed
        else:
            plan.missing = target - len(ready)
            plan.needed = max(0, minimum - len(ready) - len(replayed))
            if enough:
                plan.retry_in_s = self.spec.coalesce_s - waited
        return plan

    def moves_to(self, version: Version, now: float) -> bool:
        """Learn which weights the next step starts from; whether that is a new version, which is served then."""
        if self.version is not None and version <= self.version:
            return False
        self.version, self._consumed_in_version = version, 0
        self.replay.moves_to(version.number)
        self.stale_watch.moved(version.number, now)
        return True

    def apply_take(self, plan: TakePlan, target: int) -> str:
        """Move the ready groups to taken; returns the batch id."""
        self.discard([group for groups in plan.drops.values() for group in groups])
        if not plan.ready:
            if plan.missing:
                self.missing, self.needed = plan.missing, plan.needed
            return ""
        self.missing = None
        self.discard(plan.ready)
        self.replay.remove(plan.replayed)
        self._batches += 1
        batch_id = f"{self.model_id}/{self._registration}.{self._batches}"
        credit = min(len(plan.ready), target)
        self._taken[batch_id] = _Taken(tuple(plan.ready), tuple(plan.replayed), credit)
        return batch_id

    def taken(self, batch_id: str) -> tuple[QueuedGroup, ...]:
        """Groups of a batch that is in training, for the first time.

        Raises:
            ValueError: there is no such batch.
        """
        return self._batch(batch_id).groups

    def replayed(self, batch_id: str) -> tuple[QueuedGroup, ...]:
        """Groups of the batch that were trained before.

        Raises:
            ValueError: there is no such batch.
        """
        return self._batch(batch_id).replayed

    def _batch(self, batch_id: str) -> _Taken:
        if batch_id not in self._taken:
            raise ValueError(f"policy {self.model_id}: batch {batch_id!r} is not taken (settled before?)")
        return self._taken[batch_id]

    def consumed(self, batch_id: str, step: int) -> None:
        """The batch was trained by the step that leads to version ``step``."""
        batch = self._taken.pop(batch_id)
        self._consumed_in_version += batch.credit
        if not self.retired:
            self.replay.add(group.trained(step) for group in (*batch.replayed, *batch.groups))

    def dropped(self, batch_id: str) -> None:
        """Its replayed groups are not tried again either: any of its groups may be what the step failed on."""
        del self._taken[batch_id]

    def give_back(self, batch_id: str) -> None:
        """Return a taken batch to the head of the queue, in its old order."""
        self.give_back_repaired(batch_id, self.taken(batch_id), self.replayed(batch_id))

    def give_back_repaired(self, batch_id: str, groups: Sequence[QueuedGroup], replayed: Sequence[QueuedGroup]) -> None:
        """Return what is left of a taken batch."""
        del self._taken[batch_id]
        self.replay.add(replayed)
        self._waiting.extendleft(reversed(groups))

    def give_backs(self) -> dict[str, int]:
        """Trainers that died with a group, if the present one did now; other groups are not in it."""
        earlier = {group.group_id: group.give_backs for group in self._waiting if group.give_backs}
        return earlier | {g.group_id: g.give_backs + 1 for taken in self._taken.values() for g in taken.groups}

    def waiting(self) -> list[QueuedGroup]:
        return list(self._waiting)

    def refill(
        self, groups: Sequence[QueuedGroup], registration: int, *, trained: Sequence[QueuedGroup] = (), number: int = 0
    ) -> None:
        """Start from what the ledger holds.

        Args:
            groups: those that wait.
            registration: keeps batch ids of earlier starts apart.
            trained: those that may be replayed.
            number: version number that the policy starts at.
        """
        self._waiting = deque(groups)
        self._registration = registration
        self.replay = ReplayPool(self.spec, number)
        self.replay.add(group for group in trained if self.fate_of(group) is None)
