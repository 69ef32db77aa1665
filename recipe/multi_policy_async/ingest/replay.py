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
"""Replay for a policy that is seldom called: groups that were trained already fill up a batch that stays too small.

A policy that one workflow in ten calls waits long for a full batch, or trains on noise. With ``replay.max_uses``
above 1 a batch that is still short when its oldest group has waited ``coalesce_s`` is filled with the newest groups
that this policy has trained. A group is replayed whole, at most once per version, within ``max_age`` and
``max_staleness``, and is in at most ``max_uses`` batches that the surviving weights have seen (invariant 2). At least
``1 - max_share`` of a batch is new, so a trainer never goes on by replay alone. The trainer sees the log-probs of the
weights that sampled, so that verl's rollout correction weighs old rows by what has changed since; without it a job
with replay is refused (configuration/training_checks.py).
"""

from collections.abc import Iterable, Sequence

from ..trajectory import Version
from .groups import QueuedGroup
from .spec import QueueSpec


class ReplayPool:
    """Trained groups of one policy that may be trained again; ids only.

    Args:
        spec: the policy's queue configuration.
        number: version number that the policy starts at.
    """

    def __init__(self, spec: QueueSpec, number: int = 0):
        self._spec = spec
        self._number = number
        self._groups: dict[str, QueuedGroup] = {}  # in the order of their last training

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def enabled(self) -> bool:
        return self._spec.replay.max_uses > 1

    @property
    def max_age(self) -> int:
        """Versions between a group's oldest token and the step that replays it."""
        bound = self._spec.max_staleness
        return self._spec.replay.max_age if bound is None else min(self._spec.replay.max_age, bound)

    @property
    def oldest(self) -> int | None:
        """Version number of the oldest rows that can be replayed, now or later; ``None``: no row ever is."""
        return self._number - self.max_age if self.enabled else None

    def add(self, groups: Iterable[QueuedGroup]) -> None:
        """Take in groups that were just trained, or that a batch was given back with."""
        if self.enabled:
            self._groups |= {group.group_id: group for group in groups if group.uses < self._spec.replay.max_uses}

    def moves_to(self, number: int) -> None:
        """The policy's next step starts from version ``number``: forget what has become too old."""
        self._number = number
        self._groups = {key: group for key, group in self._groups.items() if group.oldest >= number - self.max_age}

    def choose(self, fresh: int, target: int, version: Version, lineage: dict[int, int]) -> list[QueuedGroup]:
        """Groups to fill a batch of ``fresh`` new ones up to ``target``: the newest first, then the least used."""
        share = self._spec.replay.max_share
        room = min(target - fresh, int(fresh * share / (1 - share) + 1e-9))
        if room <= 0:
            return []
        able = [
            group
            for group in reversed(self._groups.values())
            if group.last_step <= version.number
            and group.staleness(version) <= self.max_age
            and group.survives(version, lineage)
        ]
        return sorted(able, key=lambda group: (group.staleness(version), group.uses))[:room]

    def remove(self, groups: Sequence[QueuedGroup]) -> None:
        for group in groups:
            del self._groups[group.group_id]

    def clear(self) -> None:
        self._groups.clear()
