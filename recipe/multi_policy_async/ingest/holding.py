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
"""When a policy waits: with a batch for groups in play, with its next version for an evaluation.

``on_stale: hold``: a policy waits with a batch for groups that will be stale in its next version.

A group of an open task cannot be trained before its last workflow has ended. If the policy made its next version
meanwhile, the group could pass ``max_staleness`` and all of it would be dropped, the longest workflows first. It must
wait before the batch and not before it publishes: the weights are a version older for what waits as soon as the step is
done. Holding is bounded: it ends when such groups fill the batch or fit into later ones, and a task holds nobody once
the deadlines of its running workflows have passed.

Nothing is lost then while the lead fits the bound: with the groups of at most ``max_staleness`` + 1 versions between
admission and training, those that a version makes stale fit into its batches. (The lead counts open tasks by what tasks
bring on average; where they differ, a run of rich ones can be too many.)

``validation.pin: hold_syncs``: no policy publishes while the whole team is evaluated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..trajectory import Version
from .group_queue import GroupQueue
from .groups import OpenTask


@dataclass(frozen=True)
class InFlight:
    """A workflow without a terminal record."""

    task_key: str
    sample: int
    deadline: float | None = None  # monotonic seconds; None: unknown, it holds nobody
    versions: Mapping[str, int] = field(default_factory=dict)  # version numbers by policy when it was issued
    issued: float | None = None  # monotonic seconds; None: by an earlier process

    @property
    def place(self) -> tuple[str, int]:
        return self.task_key, self.sample


class VersionPin:
    """While it is set no policy publishes. It runs out by itself: an evaluation that died holds nobody.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._until = 0.0

    def set(self, seconds: float) -> None:
        """Set it, or renew it."""
        self._until = self._clock() + seconds

    def lift(self) -> None:
        self._until = self._clock()

    @property
    def is_set(self) -> bool:
        return self._clock() < self._until


def holds(
    queue: GroupQueue,
    groups: int,
    version: Version,
    batches_left: int,
    open_tasks: Mapping[str, OpenTask],
    in_flight: Mapping[str, InFlight],
    now: float,
    issued_by: float = math.inf,
) -> bool:
    """Whether a batch of ``groups`` at ``version`` should wait for open tasks; ``batches_left`` more make the version.

    It should while this version is the last chance of a group in play, while such groups do not fill the batch, and
    while they are too many for the batches that are left. A running workflow counts with the version served when it was
    issued, the oldest that it can have sampled; those issued after ``issued_by`` do not count.
    """
    bound = queue.spec.max_staleness
    if queue.spec.on_stale != "hold" or bound is None or queue.retired:
        return False
    last_chance, most = version.number - bound, queue.largest_batch(groups)
    waiting = sum(group.oldest == last_chance for group in queue.waiting())
    if waiting >= most:
        return False
    played: dict[str, set[int]] = {}  # versions of what is left of a task
    for workflow in in_flight.values():
        if workflow.deadline is None or workflow.deadline <= now or (workflow.issued or 0.0) > issued_by:
            continue
        versions = played.setdefault(workflow.task_key, set())
        if (number := workflow.versions.get(queue.model_id)) is not None:
            versions.add(number)
    oldest = (
        min((*versions, *open_tasks[key].groups.oldest(queue.model_id)), default=None)
        for key, versions in played.items()
    )
    playing = sum(number == last_chance for number in oldest)
    return playing > 0 and playing + waiting > batches_left * most
