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
"""Row counts of one policy; the accounting identity of invariant 3."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .group_queue import GroupQueue
from .groups import OpenTask
from .reasons import DROP_REASONS, RECORDED, TRAINED


@dataclass
class Account:
    """accepted = trained + recorded + dropped + waiting (in open groups, queued or taken), in trajectory rows."""

    accepted: int = 0
    trained: int = 0
    recorded: int = 0
    replayed: int = 0  # trained rows in a further batch, once per batch; not part of the identity
    dropped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_counts(cls, counts: dict[str | None, int], replayed: int = 0) -> "Account":
        """Read back from ``Ledger.counts`` and ``Ledger.replay_counts``."""
        return cls(
            replayed=replayed,
            accepted=sum(counts.values()),
            trained=counts.get(TRAINED, 0),
            recorded=counts.get(RECORDED, 0),
            dropped=Counter({reason: counts[reason] for reason in DROP_REASONS if counts.get(reason)}),
        )

    def accept(self, fate: str | None) -> None:
        self.accepted += 1
        if fate is not None:
            self.settle(fate, 1)

    def settle(self, fate: str, rows: int) -> None:
        """``rows`` waiting rows got ``fate``."""
        if fate == TRAINED:
            self.trained += rows
        elif fate == RECORDED:
            self.recorded += rows
        elif rows:
            self.dropped[fate] += rows

    def balance(self, waiting: int) -> int:
        """Zero, if no row was lost or counted twice."""
        return self.accepted - self.trained - self.recorded - self.dropped.total() - waiting


def model_stats(queue: GroupQueue, account: Account, open_tasks: Iterable[OpenTask]) -> dict[str, Any]:
    """One policy's numbers for the console and the metrics.

    Rows: ``accepted`` = ``trained`` + ``recorded`` + ``dropped`` (by reason) + ``open`` + ``queued`` + ``taken``;
    ``unaccounted`` is what is missing, always 0; ``replayed`` counts trained rows once more per further batch. Groups:
    ``queue_groups``, ``missing_groups`` (that a trainer which waits lacks), ``taken_groups``, ``replay_groups`` (may be
    trained again), ``lead_groups`` of ``max_lead_groups``; ``idle_tasks`` closed in a row without one.
    """
    tasks = list(open_tasks)
    open_rows = sum(len(task.groups.row_ids(queue.model_id)) for task in tasks)
    return {
        "accepted": account.accepted,
        "trained": account.trained,
        "recorded": account.recorded,
        "replayed": account.replayed,
        "dropped": dict(account.dropped),
        "open": open_rows,
        "queued": queue.waiting_rows,
        "taken": queue.taken_rows,
        "unaccounted": account.balance(open_rows + queue.waiting_rows + queue.taken_rows),
        "queue_groups": len(queue),
        "missing_groups": queue.missing or 0,
        "max_queue_groups": queue.capacity,
        "taken_groups": queue.taken_groups,
        "replay_groups": len(queue.replay),
        "lead_groups": queue.lead(len(tasks)),
        "max_lead_groups": queue.spec.max_lead_groups,
        "groups_per_task": queue.groups_per_task,
        "idle_tasks": queue.idle_tasks,
        "held_s": queue.held_s,
        "state": queue.state,
    }
