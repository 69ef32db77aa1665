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
"""Keeps the ledger as small as what could still be needed.

A row can be trained again only after a restore at a checkpoint that was saved after the row was sampled and before it
was consumed. So a row sampled by version v and consumed by step k is needed while a checkpoint's step lies in [v, k);
without checkpoints the initial weights count as one, at 0. Rows that replay may use are needed too; dropped and
recorded rows never are. The trained rows of a group stay or go together, since a group is trained again as a whole or
not at all. What is not needed is counted in ``pruned`` and deleted, and so are the workflows of a closed task without
a row left.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from . import ledger_images
from .database import Database, chunks, marks
from .ledger_checkpoints import descent, pruned_beyond_start
from .reasons import TRAINED
from .turns import TURNS_CLASS

_STEP = 2000  # rows of one transaction, a few ten milliseconds


def prune(db: Database, replayable: Mapping[str, int]) -> Iterator[int]:
    """Prune in small transactions; yields the rows deleted by each, so that others can write in between.

    Args:
        db: the ledger's database.
        replayable: per model with replay, the version number of the oldest rows that it may use; read at each step.
    """
    for model_id, fate, incarnation in db.execute(
        "SELECT DISTINCT model_id, fate, consumed_incarnation FROM rows WHERE fate IS NOT NULL"
    ).fetchall():
        while deleted := _prune_rows(db, model_id, fate, incarnation, replayable.get(model_id)):
            yield deleted
    yield from _prune_workflows(db)
    db.execute("PRAGMA incremental_vacuum").fetchall()  # one page per step


def _prune_rows(db: Database, model_id: str, fate: str, incarnation: int | None, replayable: int | None) -> int:
    with db.transaction():
        condition, values = "model_id = ? AND fate = ?", [model_id, fate]
        if fate == TRAINED:
            condition += " AND consumed_incarnation = ?"
            values += [incarnation]
            needed, more = _needed(db, model_id, incarnation)
            if replayable is not None:
                needed, more = f"{needed} OR oldest >= ?", [*more, replayable]
            condition += f" AND group_id NOT IN (SELECT group_id FROM rows WHERE {condition} AND ({needed}))"
            values += [*values, *more]
        found = db.execute(
            f"SELECT id, group_id FROM rows WHERE {condition} ORDER BY group_id, id LIMIT {_STEP + 1}", values
        ).fetchall()
        cut = found[-1][1] if len(found) > _STEP else None  # the rest of this group comes with the next step
        if found and found[0][1] == cut:  # a group larger than a step is a step
            found = db.execute(f"SELECT id, group_id FROM rows WHERE {condition} AND group_id = ?", [*values, cut])
            cut = None
        ids = [row_id for row_id, group_id in found if group_id != cut]
        for some in chunks(ids):
            db.execute(
                "INSERT INTO pruned SELECT model_id, fate, coalesce(consumed_incarnation, -1), "
                f"coalesce(consumed_step, -1), {TURNS_CLASS}, count(*), sum(sampled_tokens) FROM rows "
                f"WHERE id IN ({marks(some)}) GROUP BY 1, 2, 3, 4, 5 ON CONFLICT DO UPDATE SET "
                "rows = rows + excluded.rows, sampled_tokens = sampled_tokens + excluded.sampled_tokens",
                some,
            )
            db.execute(
                "INSERT INTO pruned_replays SELECT model_id, incarnation, step, count(*) FROM replays "
                f"WHERE row_id IN ({marks(some)}) GROUP BY 1, 2, 3 "
                "ON CONFLICT DO UPDATE SET uses = uses + excluded.uses",
                some,
            )
            db.execute(f"DELETE FROM replays WHERE row_id IN ({marks(some)})", some)
            db.execute(f"DELETE FROM payloads WHERE row_id IN ({marks(some)})", some)
            ledger_images.forget(db, some)
            db.execute(f"DELETE FROM rows WHERE id IN ({marks(some)})", some)
        return len(ids)


def _needed(db: Database, model_id: str, consumed_incarnation: int | None) -> tuple[str, list[int | str]]:
    """SQL condition on a trained row: a checkpoint descends from the weights that sampled it, not from its step."""
    checkpoints = db.execute("SELECT incarnation, step FROM checkpoints WHERE model_id = ?", (model_id,)).fetchall()
    if checkpoints:
        db.execute("INSERT INTO meta VALUES (?, '1') ON CONFLICT DO NOTHING", (pruned_beyond_start(model_id),))
    else:
        return "newest = 0", []
    origins = {
        each: (parent, step or 0)
        for each, parent, step in db.execute(
            "SELECT incarnation, restored_incarnation, restored_step FROM incarnations WHERE model_id = ?", (model_id,)
        )
    }
    conditions, values = [], []
    for incarnation, step in checkpoints:
        surviving = descent(origins, incarnation, step)
        for sampled, number in surviving.items():
            if number >= 0:
                conditions.append("(incarnation = ? AND newest <= ? AND consumed_step > ?)")
                values += [sampled, number, surviving.get(consumed_incarnation, -1)]
    return " OR ".join(conditions), values


def _prune_workflows(db: Database) -> Iterator[int]:
    """Delete closed tasks without rows and their workflows; their numbers stay in ``started_tasks``.

    The one that closed last stays: it tells the next start how many tasks are over (``start_after_tasks``).
    """
    while True:
        with db.transaction():
            gone = db.execute(
                "SELECT task_key, epoch, task FROM tasks WHERE closed < (SELECT max(closed) FROM tasks) "
                f"AND NOT EXISTS (SELECT 1 FROM rows WHERE rows.task_key = tasks.task_key) LIMIT {_STEP}"
            ).fetchall()
            for epoch in {epoch for _, epoch, _ in gone}:
                _add_started(db, epoch, [task for _, its_epoch, task in gone if its_epoch == epoch])
            for some in chunks([key for key, _, _ in gone]):
                db.execute(
                    "INSERT INTO pruned_workflows SELECT status, count(*) FROM workflows "
                    f"WHERE task_key IN ({marks(some)}) GROUP BY 1 "
                    "ON CONFLICT DO UPDATE SET workflows = workflows + excluded.workflows",
                    some,
                )
                db.execute(f"DELETE FROM workflows WHERE task_key IN ({marks(some)})", some)
                db.execute(f"DELETE FROM tasks WHERE task_key IN ({marks(some)})", some)
        if gone:
            yield 0
        if len(gone) < _STEP:
            return


def _add_started(db: Database, epoch: int, tasks: list[int]) -> None:
    known = started_tasks(db, epoch)
    bits = np.zeros(max(len(known), max(tasks) + 1), dtype=bool)
    bits[: len(known)] = known
    bits[tasks] = True
    body = np.packbits(bits).tobytes()
    db.execute("INSERT OR REPLACE INTO started_tasks VALUES (?, ?)", (epoch, body))


def started_tasks(db: Database, epoch: int) -> np.ndarray:
    """Which tasks of an epoch were started and pruned: bool ``[tasks, rounded up to 8]``."""
    found = db.execute("SELECT tasks FROM started_tasks WHERE epoch = ?", (epoch,)).fetchone()
    return np.unpackbits(np.frombuffer(found[0] if found else b"", dtype=np.uint8)).astype(bool)
