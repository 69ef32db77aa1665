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
"""Checkpoints and incarnations in the ledger: which weights survive, and which rows wait again after a restore."""

import time

from .database import Database
from .reasons import ROLLED_BACK, TRAINED


class Checkpoints:
    """A view on the ledger's tables of checkpoints and incarnations.

    Args:
        db: the ledger's database.
    """

    def __init__(self, db: Database):
        self._db = db

    def add(self, model_id: str, incarnation: int, step: int, digest: str, path: str) -> None:
        """Commit a checkpoint whose files are complete on disk."""
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)",
                (model_id, incarnation, step, digest, path, time.time()),
            )

    def remove(self, model_id: str, incarnation: int, step: int) -> None:
        """Forget a checkpoint, before its files are deleted; what only it needed can be pruned.

        Raises:
            ValueError: it is not known.
        """
        with self._db.transaction():
            done = self._db.execute(
                "DELETE FROM checkpoints WHERE (model_id, incarnation, step) = (?, ?, ?)", (model_id, incarnation, step)
            )
            if done.rowcount == 0:
                raise ValueError(f"{self._db.path} knows no checkpoint of {model_id} at {(incarnation, step)}")

    def all(self) -> list[tuple[str, int, int, str, str]]:
        """(model id, incarnation, step, path, digest) of what can be restored, by model, oldest first."""
        return self._db.execute(
            "SELECT model_id, incarnation, step, path, digest FROM checkpoints ORDER BY model_id, incarnation, step"
        ).fetchall()

    def begin_incarnation(self, model_id: str, restored: tuple[int, int] | None) -> int:
        """Start a model, fresh or from its checkpoint ``(incarnation, step)``; returns the new incarnation.

        Rows consumed by steps outside the new lineage wait again, since the surviving weights never saw them.
        Checkpoints outside it are given up: a row that waits again may be trained by the new branch, so what the
        old one had seen would not be known any more.

        Raises:
            ValueError: the checkpoint is not known, or the ledger was pruned beyond a fresh start.
        """
        with self._db.transaction():
            if restored is None:
                self._check_fresh_start(model_id)
            elif not self._db.execute(
                "SELECT 1 FROM checkpoints WHERE (model_id, incarnation, step) = (?, ?, ?)", (model_id, *restored)
            ).fetchone():
                raise ValueError(
                    f"ledger {self._db.path} knows no checkpoint of {model_id} at {restored} "
                    "(removed, or given up by a restore at an earlier step)"
                )
            (incarnation,) = self._db.execute(
                "SELECT coalesce(max(incarnation) + 1, 0) FROM incarnations WHERE model_id = ?", (model_id,)
            ).fetchone()
            self._db.execute(
                "INSERT INTO incarnations VALUES (?, ?, ?, ?, ?)",
                (model_id, incarnation, *(restored or (None, None)), time.time()),
            )
            surviving = self.lineage(model_id)
            for earlier in range(incarnation):
                self._db.execute(
                    "DELETE FROM checkpoints WHERE model_id = ? AND incarnation = ? AND step > ?",
                    (model_id, earlier, surviving[earlier]),
                )
                lost = (model_id, TRAINED, earlier, surviving[earlier])
                self._db.execute(
                    "UPDATE rows SET fate = NULL, consumed_incarnation = NULL, consumed_step = NULL "
                    "WHERE model_id = ? AND fate = ? AND consumed_incarnation = ? AND consumed_step > ?",
                    lost,
                )
                for table in ("replays", "pruned_replays"):
                    self._db.execute(
                        f"DELETE FROM {table} WHERE model_id = ? AND incarnation = ? AND step > ?",
                        (model_id, earlier, surviving[earlier]),
                    )
                # Pruned rows of lost steps were sampled by lost weights (ledger_prune.py): they cannot wait again.
                self._db.execute(
                    "UPDATE pruned SET fate = ?1 WHERE model_id = ?2 AND fate = ?3 "
                    "AND consumed_incarnation = ?4 AND consumed_step > ?5",
                    (ROLLED_BACK, *lost),
                )
        return incarnation

    def lineage(self, model_id: str) -> dict[int, int]:
        """Newest version number of each incarnation before the current one that its weights descend from.

        An incarnation starts with its checkpoint's weights, so its first number survives if that checkpoint does; 0,
        the initial weights, always does. -1: nothing of the incarnation survives.
        """
        origins = {
            incarnation: (parent, step or 0)
            for incarnation, parent, step in self._db.execute(
                "SELECT incarnation, restored_incarnation, restored_step FROM incarnations WHERE model_id = ?",
                (model_id,),
            )
        }
        surviving = descent(origins, max(origins, default=None))
        surviving.pop(max(origins, default=-1), None)
        return surviving

    def _check_fresh_start(self, model_id: str) -> None:
        if self._db.execute("SELECT 1 FROM meta WHERE key = ?", (pruned_beyond_start(model_id),)).fetchone():
            raise ValueError(
                f"ledger {self._db.path} is pruned behind the checkpoints of {model_id}: it cannot start from its "
                "initial weights; restore a checkpoint or use another run directory"
            )


def pruned_beyond_start(model_id: str) -> str:
    """Key in ``meta`` of a model whose rows were pruned on the strength of its checkpoints."""
    return f"pruned_beyond_start/{model_id}"


def descent(origins: dict[int, tuple[int | None, int]], start: int | None, step: int | None = None) -> dict[int, int]:
    """Newest surviving version number by incarnation, for weights at ``step`` of incarnation ``start``.

    Args:
        origins: incarnation -> (incarnation, step) of the checkpoint it began with; ``(None, 0)`` for a fresh start.
        start: incarnation of the weights.
        step: their number; ``None``: the incarnation's newest.
    """
    surviving: dict[int, int] = {}
    if start is not None and step is not None:
        surviving[start] = step
    at = start
    while at is not None:
        at, first = origins[at]
        if at is not None:
            surviving[at] = first
    for incarnation, (parent, first) in sorted(origins.items()):
        if incarnation not in surviving:
            survives = parent is None or surviving.get(parent, -1) >= first
            surviving[incarnation] = first if survives else -1
    return surviving
