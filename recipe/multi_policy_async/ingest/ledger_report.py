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
"""Questions to a ledger file, also while a job writes to it: read-only, on a connection of its own."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import ledger_counts, ledger_images, turns
from .database import check_schema
from .ledger_checkpoints import pruned_beyond_start
from .ledger_schema import LEDGER_ID
from .reasons import DAMAGED, STALE, TRAINED
from .row_codec import decode_arrays

_EXPORT_ROWS = 1000  # of one row group in the parquet file


@contextmanager
def open_ledger(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection, whose queries all see the ledger as it was at the first, also while a job writes.

    Raises:
        ValueError: there is no ledger at ``path``.
    """
    if not path.is_file():
        raise ValueError(f"there is no ledger at {path}")
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    try:
        db.execute("BEGIN")
        check_schema(db, path)
        yield db
    finally:
        db.close()


def row_counts(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Rows and sampled tokens by model and fate, pruned ones included; the fate of rows that wait is ``waiting``."""
    return _dicts(
        db,
        "SELECT model_id, coalesce(fate, 'waiting') AS fate, sum(n) AS rows, sum(tokens) AS sampled_tokens FROM ("
        "SELECT model_id, fate, 1 AS n, sampled_tokens AS tokens FROM rows "
        "UNION ALL SELECT model_id, fate, rows, sampled_tokens FROM pruned) GROUP BY 1, 2 ORDER BY 1, 2",
    )


def replay_counts(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Trained rows in a further batch, once per batch, by model."""
    return [{"model_id": model_id, "rows": rows} for model_id, rows in ledger_counts.replayed(db).items()]


def stale_by_turns(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Per model and turns that the agent took in the workflow: rows trained, rows stale, and their share."""
    return [
        {
            "model_id": model_id,
            "turns": turns.label(first),
            "trained": counts[TRAINED],
            "stale": counts[STALE],
            "stale_share": round(turns.stale_share(counts), 3),
        }
        for model_id, classes in sorted(ledger_counts.by_turns(db).items())
        for first, counts in sorted(classes.items())
    ]


def abandoned_tokens(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Sampled tokens that never became rows, by model and reason."""
    return _dicts(db, "SELECT model_id, reason, tokens AS sampled_tokens FROM abandoned ORDER BY 1, 2")


def workflow_counts(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Workflows by status, pruned ones included; without a terminal record they are ``in flight``."""
    return _dicts(
        db,
        "SELECT coalesce(status, 'in flight') AS status, sum(n) AS workflows FROM ("
        "SELECT status, 1 AS n FROM workflows UNION ALL SELECT status, workflows FROM pruned_workflows) "
        "GROUP BY 1 ORDER BY 1",
    )


def checkpoints(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Checkpoints that can be restored."""
    return _dicts(
        db, "SELECT model_id, incarnation, step, path, digest FROM checkpoints ORDER BY model_id, incarnation, step"
    )


def ledger_id(db: sqlite3.Connection) -> str | None:
    """What tells this ledger from every other one; ``None`` in files that were made before they had it."""
    found = db.execute("SELECT value FROM meta WHERE key = ?", (LEDGER_ID,)).fetchone()
    return found and found["value"]


def is_pruned_beyond_start(db: sqlite3.Connection, model_id: str) -> bool:
    """Whether rows are gone that the model would need to start from its initial weights."""
    key = pruned_beyond_start(model_id)
    return db.execute("SELECT 1 FROM meta WHERE key = ?", (key,)).fetchone() is not None


def workflow_life(db: sqlite3.Connection, workflow_id: str) -> dict[str, Any]:
    """One workflow: its record, its other attempts, and what became of each of its rows.

    Raises:
        ValueError: the ledger does not have it (never issued, or pruned).
    """
    found = _dicts(db, "SELECT * FROM workflows WHERE workflow_id = ?", (workflow_id,))
    if not found:
        raise ValueError(f"workflow {workflow_id} is not in the ledger: never issued, or pruned")
    (life,) = found
    life["digest"] = None if life["digest"] is None else life["digest"].hex()
    attempts = db.execute(
        "SELECT workflow_id FROM workflows WHERE task_key = ? AND sample = ? ORDER BY attempt",
        (life["task_key"], life["sample"]),
    )
    life["attempts"] = [row["workflow_id"] for row in attempts]
    life["rows"] = _dicts(
        db,
        "SELECT trajectory_id, model_id, group_id, turn, request_id, finish_reason, reward, sampled_tokens, "
        "context_tokens, turns, incarnation, oldest, newest, coalesce(fate, 'waiting') AS fate, consumed_incarnation, "
        "consumed_step, (SELECT count(*) FROM replays WHERE row_id = id) AS replayed FROM rows "
        "WHERE workflow_id = ? ORDER BY id",
        (workflow_id,),
    )
    return life


def export_parquet(db: sqlite3.Connection, path: Path) -> int:
    """Write all rows that still have their payload, but for damaged ones, to a parquet file; returns how many.

    Columns: those of ``workflow_life``'s rows, ``workflow_id``, ``agent_id``, ``score`` of the workflow, and the arrays
    ``prompt_ids``, ``response_ids``, ``response_mask``, ``log_probs``, ``versions``; ``images`` as they were sent;
    ``metadata`` as JSON text.

    Raises:
        ValueError: a row is damaged, and no trainer has met it yet.
    """
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            *((name, pa.string()) for name in _TEXTS),
            *((name, pa.int64()) for name in _NUMBERS),
            *((name, pa.float64()) for name in ("reward", "score")),
            *((name, pa.list_(pa.int32())) for name in ("prompt_ids", "response_ids", "versions")),
            ("response_mask", pa.list_(pa.uint8())),
            ("log_probs", pa.list_(pa.float32())),
            ("images", pa.list_(pa.binary())),
            ("metadata", pa.string()),
        ]
    )
    columns = ", ".join(f"rows.{name}" for name in (*_TEXTS, *_NUMBERS, "reward"))
    query = db.execute(
        f"SELECT {columns}, id, score, body FROM rows JOIN payloads ON row_id = id JOIN workflows USING (workflow_id) "
        f"WHERE fate IS NOT '{DAMAGED}' ORDER BY id"
    )
    written = 0
    with pq.ParquetWriter(path, schema) as writer:
        while some := query.fetchmany(_EXPORT_ROWS):
            records = []
            images = ledger_images.read(db, [row["id"] for row in some])
            for row in some:
                record = dict(row)
                record["images"] = images.get(record.pop("id"), ())
                try:
                    record.update(decode_arrays(record.pop("body")))
                except ValueError as error:
                    raise ValueError(f"row {record['trajectory_id']}: {error}") from error
                record["metadata"] = json.dumps(record["metadata"])
                records.append(record)
            writer.write_table(pa.Table.from_pylist(records, schema=schema))
            written += len(records)
    return written


_TEXTS = (
    "trajectory_id",
    "workflow_id",
    "model_id",
    "agent_id",
    "group_id",
    "request_id",
    "finish_reason",
    "fate",
)
_NUMBERS = (
    "turn",
    "sampled_tokens",
    "context_tokens",
    "turns",
    "incarnation",
    "oldest",
    "newest",
    "consumed_incarnation",
    "consumed_step",
)


def _dicts(db: sqlite3.Connection, query: str, values: tuple = ()) -> list[dict[str, Any]]:
    return [dict(row) for row in db.execute(query, values)]
