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
"""The ledger's SQLite file: opened in WAL mode, one writer, transactions that are all or nothing."""

import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .ledger_schema import LEDGER_ID, SCHEMA, SCHEMA_VERSION

_CHUNK = 500  # values in one statement, below SQLite's limit on variables


class Database:
    """Open or create the ledger file.

    Args:
        path: the file; its folder is made.
        synchronous: SQLite's setting, ``normal`` or ``full``.

    Raises:
        ValueError: the file is of another schema version.
    """

    def __init__(self, path: str | Path, *, synchronous: str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file: pruning gives pages back
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        with self.transaction():
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                for statement in SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
                self._db.execute("INSERT INTO meta VALUES (?, ?)", (LEDGER_ID, uuid.uuid4().hex))
        check_schema(self._db, self.path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; takes the write lock at once."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:  # whatever came, half a transaction must not stay; the error goes on
            if self._db.in_transaction:  # after errors of the disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(statement, values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        return self._db.executemany(statement, values)

    @property
    def changes(self) -> int:
        """Rows written since the file was opened."""
        return self._db.total_changes

    def close(self) -> None:
        self._db.close()


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that this program cannot read.

    Raises:
        ValueError: it is of another schema version, or no ledger.
    """
    try:
        found = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0]
    except (sqlite3.DatabaseError, TypeError) as error:
        raise ValueError(f"{path} is not a ledger: {error}") from error
    if found != str(SCHEMA_VERSION):
        raise ValueError(f"ledger {path} has schema version {found}, this program needs {SCHEMA_VERSION}")


def marks(values: Sequence[Any]) -> str:
    """Placeholders for ``IN (...)``."""
    return ", ".join("?" * len(values))


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """``values`` in pieces that fit into one statement."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
