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
"""Sums over a ledger's rows, those of pruned ones included. For the ingestor and for readers of the file."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .turns import COMPARED, TURNS_CLASS


class Connection(Protocol):
    """The ledger's database, or a read-only connection to it."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Iterable[Any]: ...


def by_fate(db: Connection) -> dict[str, dict[str | None, int]]:
    """Rows by model and fate (``None``: waiting)."""
    found: dict[str, dict[str | None, int]] = {}
    for model_id, fate, n in db.execute(
        "SELECT model_id, fate, sum(n) FROM (SELECT model_id, fate, count(*) AS n FROM rows GROUP BY 1, 2 "
        "UNION ALL SELECT model_id, fate, rows FROM pruned) GROUP BY 1, 2"
    ):
        found.setdefault(model_id, {})[fate] = n
    return found


def by_turns(db: Connection) -> dict[str, dict[int, Counter[str]]]:
    """Rows that were trained or stale, by model, class of turns (turns.py) and fate."""
    found: dict[str, dict[int, Counter[str]]] = {}
    for model_id, first, fate, n in db.execute(
        f"SELECT model_id, first, fate, sum(n) FROM (SELECT model_id, {TURNS_CLASS} AS first, fate, 1 AS n FROM rows "
        "WHERE fate IN (?1, ?2) UNION ALL SELECT model_id, turns, fate, rows FROM pruned WHERE fate IN (?1, ?2)) "
        "GROUP BY 1, 2, 3",
        COMPARED,
    ):
        found.setdefault(model_id, {}).setdefault(first, Counter())[fate] = n
    return found


def replayed(db: Connection) -> dict[str, int]:
    """Rows trained again by model, once per further batch."""
    found = db.execute(
        "SELECT model_id, sum(n) FROM (SELECT model_id, count(*) AS n FROM replays GROUP BY 1 "
        "UNION ALL SELECT model_id, uses FROM pruned_replays) GROUP BY 1 ORDER BY 1"
    )
    return {model_id: n for model_id, n in found}
