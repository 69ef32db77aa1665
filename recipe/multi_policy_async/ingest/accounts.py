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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .group_queue import GroupQueue
from .groups import OpenTask, QueuedGroup
from .ledger import Ledger
from .reasons import DROP_REASONS, RECORDED, TRAINED
from .turns import COMPARED, label, stale_share, turns_class


@dataclass
class Account:
    """accepted = trained + recorded + dropped + waiting (in open groups, queued or taken), in trajectory rows."""

    accepted: int = 0
    trained: int = 0
    recorded: int = 0
    replayed: int = 0  # trained rows in a further batch, once per batch; not part of the identity
    dropped: Counter[str] = field(default_factory=Counter)
    turns: dict[int, Counter[str]] = field(default_factory=dict)  # rows trained or stale, by class of turns and fate

    @classmethod
    def from_ledger(cls, ledger: Ledger) -> "dict[str, Account]":
        """The accounts of all policies in a ledger."""
        replayed, turns = ledger.replay_counts(), ledger.turn_counts()
        return {
            model_id: cls._from_counts(counts, replayed.get(model_id, 0), turns.get(model_id, {}))
            for model_id, counts in ledger.counts().items()
        }

    @classmethod
    def _from_counts(cls, counts: dict[str | None, int], replayed: int, turns: dict[int, Counter[str]]) -> "Account":
        return cls(
            replayed=replayed,
            turns=turns,
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

    def settle_groups(self, fate: str, groups: Sequence[QueuedGroup]) -> None:
        """The rows of ``groups`` waited, and got ``fate``."""
        rows = [row for group in groups for row in group.rows]
        self.settle(fate, len(rows))
        if fate in COMPARED:
            for row in rows:
                self.turns.setdefault(turns_class(row.turns), Counter())[fate] += 1

    def stale_shares(self) -> dict[str, float]:
        """Part of the rows that was lost as stale, of those that were trained or stale, by turns of their agent."""
        return {label(first): stale_share(counts) for first, counts in sorted(self.turns.items())}

    def balance(self, waiting: int) -> int:
        """Zero, if no row was lost or counted twice."""
        return self.accepted - self.trained - self.recorded - self.dropped.total() - waiting


def model_stats(queue: GroupQueue, account: Account, open_tasks: Iterable[OpenTask]) -> dict[str, Any]:
    """One policy's numbers for the console and the metrics.

    Rows: ``accepted`` = ``trained`` + ``recorded`` + ``dropped`` (by reason) + ``open`` + ``queued`` + ``taken``;
    ``unaccounted`` is what is missing, always 0; ``replayed`` counts trained rows once more per further batch;
    ``by_turns`` tells the trained and the stale ones by the turns of their agent in their workflow (turns.py). Groups:
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
        "by_turns": {
            label(first): {fate: counts[fate] for fate in COMPARED} for first, counts in sorted(account.turns.items())
        },
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
