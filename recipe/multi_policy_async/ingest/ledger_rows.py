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
"""Rows of the ledger with their tokens and images. What is not as it was written is told apart, row by row."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..trajectory import Trajectory
from . import ledger_images
from .database import Database, chunks, marks
from .row_codec import decode_arrays

_COLUMNS = "trajectory_id workflow_id agent_id model_id request_id turn incarnation finish_reason reward"


@dataclass(frozen=True)
class DamagedRow:
    """A row that cannot be trained, because of the file."""

    row_id: int
    workflow_id: str
    cause: str


class DamagedRowsError(ValueError):
    """Rows that were asked for cannot be read; the others can.

    Attributes:
        rows: which, and why.
    """

    def __init__(self, rows: Sequence[DamagedRow]):
        of = ", ".join(sorted({row.workflow_id for row in rows})[:5])
        super().__init__(f"{len(rows)} rows cannot be read, of workflows {of}: {rows[0].cause}")
        self.rows = tuple(rows)


def read(db: Database, row_ids: Sequence[int]) -> list[Trajectory]:
    """Trajectories of rows, in the order asked for.

    Raises:
        DamagedRowsError: the payload or an image of some rows is gone, or not what was written.
    """
    found: dict[int, Trajectory] = {}
    damaged: list[DamagedRow] = []
    images = ledger_images.read(db, row_ids)
    for some in chunks(row_ids):
        query = f"SELECT id, {_COLUMNS.replace(' ', ', ')} FROM rows WHERE id IN ({marks(some)})"
        for row_id, *columns in db.execute(query, some).fetchall():
            known = dict(zip(_COLUMNS.split(), columns, strict=True))
            try:
                shown = _sound(images.get(row_id, ()))
                found[row_id] = Trajectory(**known, **decode_arrays(_body(db, row_id)), images=shown)
            except ValueError as error:
                damaged.append(DamagedRow(row_id, known["workflow_id"], str(error)))
    if damaged:
        raise DamagedRowsError(damaged)
    return [found[row_id] for row_id in row_ids]


def _body(db: Database, row_id: int) -> bytes:
    try:
        found = db.execute("SELECT body FROM payloads WHERE row_id = ?", (row_id,)).fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise  # a disk that does not answer may do so later, and the row is as it was
        raise ValueError(f"the row's payload cannot be read: {error}") from error
    if found is None:
        raise ValueError("the row's payload is gone")
    return found[0]


def _sound(images: tuple[Any, ...]) -> tuple[bytes, ...]:
    if None in images:
        raise ValueError("an image of the row is gone, or not what was written")
    return images
