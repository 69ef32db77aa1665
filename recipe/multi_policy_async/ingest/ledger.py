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
"""The ledger: what was started, how each workflow ended, and what became of each trajectory row.

Every method is one transaction and blocks; the ingestor calls them on one thread of its own. The ledger is the source
of truth: what is in flight, the task cursor and the queues are read back from it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..trajectory import Trajectory, Version, WorkflowId, WorkflowRecord
from . import ledger_counts, ledger_images, ledger_rows
from .baselines import AgentOfModel, Baseline
from .database import Database, chunks, marks
from .ledger_checkpoints import Checkpoints
from .ledger_prune import prune, started_tasks
from .ledger_schema import LEDGER_ID, SUPERSEDED
from .reasons import TRAINED

ISSUED = "issued"
TERMINAL = "terminal"


@dataclass(frozen=True)
class NewRow:
    """A row to insert: ``fate`` is ``None`` while it waits."""

    row_id: int
    trajectory: Trajectory
    group_id: str
    fate: str | None
    body: bytes
    turns: int = 1  # of its agent in its workflow


@dataclass(frozen=True)
class FateChange:
    """Rows that get ``fate`` in the same transaction."""

    row_ids: Sequence[int]
    fate: str


@dataclass(frozen=True)
class TerminalCommit:
    """Everything that one terminal record changes, in one transaction (invariant 4)."""

    record: WorkflowRecord
    digest: bytes
    answer: dict[str, int]
    rows: Sequence[NewRow]
    fates: Sequence[FateChange] = ()
    closed: int | None = None  # closing order of the task, if this record closes it
    baselines: Mapping[AgentOfModel, Baseline] = field(default_factory=dict)  # those that its rewards change


@dataclass(frozen=True)
class WaitingRow:
    """A row without a fate, as recovery sees it."""

    row_id: int
    model_id: str
    agent_id: str
    task_key: str
    group_id: str
    closed: int | None
    incarnation: int
    oldest: int
    newest: int
    reward: float
    turns: int


_WAITING = "id, model_id, agent_id, task_key, group_id, closed, incarnation, oldest, newest, reward, turns"


@dataclass(frozen=True)
class TrainedRow(WaitingRow):
    """A row that may be trained again."""

    uses: int  # batches that it was in
    last_step: int  # version that the last of them led to


@dataclass
class Recovered:
    """What the ledger says about unfinished work."""

    next_row_id: int = 1
    next_close: int = 1
    open_tasks: dict[str, int] = field(default_factory=dict)  # task key -> members
    terminal_samples: dict[str, set[int]] = field(default_factory=dict)  # of open tasks
    in_flight: dict[str, tuple[str, int]] = field(default_factory=dict)  # workflow id -> (task key, sample)
    waiting: list[WaitingRow] = field(default_factory=list)


class Ledger:
    """Open or create the ledger at ``path``.

    Args:
        path: the database file; its folder is made.
        synchronous: SQLite's ``synchronous`` setting, ``normal`` or ``full``.

    Raises:
        ValueError: the file is of another schema version.
    """

    def __init__(self, path: str | Path, *, synchronous: str):
        self._db = Database(path, synchronous=synchronous)
        self.checkpoints = Checkpoints(self._db)

    def close(self) -> None:
        """Close the file; committed work is on disk already."""
        self._db.close()

    def ledger_id(self) -> str:
        """What tells this file from every other ledger."""
        (found,) = self._db.execute("SELECT value FROM meta WHERE key = ?", (LEDGER_ID,)).fetchone()
        return found

    def changes(self) -> int:
        """Rows of any table written since the file was opened."""
        return self._db.changes

    def prune(self, replayable: Mapping[str, int] | None = None) -> Iterator[int]:
        """See ``ledger_prune.prune``."""
        return prune(self._db, {} if replayable is None else replayable)

    def open_task(self, epoch: int, task: int, members: int) -> None:
        """Write that a task is started; its groups wait for ``members`` workflows."""
        with self._db.transaction():
            self._open_task(WorkflowId(epoch, task, 0), members)

    def _open_task(self, any_member: WorkflowId, members: int) -> None:
        self._db.execute(
            "INSERT INTO tasks VALUES (?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING",
            (any_member.task_key, any_member.epoch, any_member.task, members),
        )

    def issue(self, workflow_id: WorkflowId, members: int, now: float) -> str:
        """Write that a workflow is started.

        Returns:
            ``ISSUED``, also when it was before; ``TERMINAL`` if an attempt of the same sample has ended already.

        Raises:
            ValueError: the task was opened with another number of members, or a later attempt is in flight.
        """
        key = workflow_id.task_key
        with self._db.transaction():
            self._open_task(workflow_id, members)
            (found,) = self._db.execute("SELECT members FROM tasks WHERE task_key = ?", (key,)).fetchone()
            if found != members or workflow_id.sample >= members:
                raise ValueError(f"workflow {workflow_id}: its task has {found} members, not {members}")
            attempts = self._db.execute(
                "SELECT workflow_id, attempt, status FROM workflows WHERE task_key = ? AND sample = ?",
                (key, workflow_id.sample),
            ).fetchall()
            if any(status not in (None, SUPERSEDED) for _, _, status in attempts):
                return TERMINAL
            if any(attempt > workflow_id.attempt for _, attempt, _ in attempts):
                raise ValueError(f"workflow {workflow_id}: a later attempt was started already")
            self._db.execute(
                "UPDATE workflows SET status = ? WHERE task_key = ? AND sample = ? AND attempt < ?",
                (SUPERSEDED, key, workflow_id.sample, workflow_id.attempt),
            )
            self._db.execute(
                "INSERT INTO workflows (workflow_id, task_key, sample, attempt, issued_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (str(workflow_id), key, workflow_id.sample, workflow_id.attempt, now),
            )
        return ISSUED

    def outcome(self, workflow_id: str) -> tuple[str | None, bytes | None, dict[str, int]] | None:
        """Status, digest and first answer of a started workflow; ``None`` if it was never issued."""
        found = self._db.execute(
            "SELECT status, digest, answer FROM workflows WHERE workflow_id = ?", (workflow_id,)
        ).fetchone()
        return None if found is None else (found[0], found[1], json.loads(found[2] or "{}"))

    def commit_terminal(self, commit: TerminalCommit) -> None:
        """Write a terminal record, its rows for all models and what closing its task changes: all or nothing."""
        record = commit.record
        with self._db.transaction():
            self._db.execute(
                "UPDATE workflows SET status = ?, digest = ?, answer = ?, score = ?, error = ?, started_at = ?, "
                "ended_at = ?, versions = ? WHERE workflow_id = ?",
                (
                    record.status,
                    commit.digest,
                    json.dumps(commit.answer),
                    record.score,
                    record.error,
                    record.started_at,
                    record.ended_at,
                    json.dumps({model: [str(v) for v in span] for model, span in record.version_vector.items()}),
                    record.workflow_id,
                ),
            )
            task_key = WorkflowId.parse(record.workflow_id).task_key
            self._db.executemany(
                f"INSERT INTO rows VALUES ({', '.join('?' * 20)})", (_columns(row, task_key) for row in commit.rows)
            )
            self._db.executemany("INSERT INTO payloads VALUES (?, ?)", ((row.row_id, row.body) for row in commit.rows))
            ledger_images.store(self._db, ((row.row_id, row.trajectory.images) for row in commit.rows))
            if commit.closed is not None:
                self._db.execute("UPDATE tasks SET closed = ? WHERE task_key = ?", (commit.closed, task_key))
            self._set_fates(commit.fates)
            self._db.executemany(
                "INSERT OR REPLACE INTO baselines VALUES (?, ?, ?, ?, ?)",
                ((*key, b.rewards, b.mean, b.variance) for key, b in commit.baselines.items()),
            )

    def baselines(self) -> dict[AgentOfModel, Baseline]:
        """Moving averages of rewards, by model and agent."""
        found = self._db.execute("SELECT model_id, agent_id, rewards, mean, variance FROM baselines")
        return {(model_id, agent_id): Baseline(*numbers) for model_id, agent_id, *numbers in found}

    def abandon(self, workflow_id: str, digest: bytes, tokens: Mapping[tuple[str, str], int]) -> None:
        """Count sampled tokens of a superseded attempt that never became rows, by (model id, reason); once."""
        with self._db.transaction():
            first = self._db.execute(
                "UPDATE workflows SET digest = ? WHERE workflow_id = ? AND digest IS NULL", (digest, workflow_id)
            )
            if first.rowcount == 0:
                return
            self._db.executemany(
                "INSERT INTO abandoned VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                ((model_id, reason, n) for (model_id, reason), n in tokens.items()),
            )

    def set_fates(self, changes: Iterable[FateChange]) -> None:
        """Give waiting rows their fate."""
        with self._db.transaction():
            self._set_fates(changes)

    def consume(self, row_ids: Sequence[int], incarnation: int, step: int, replayed: Sequence[int] = ()) -> None:
        """Mark rows as trained by ``step`` of ``incarnation``, and ``replayed`` ones as trained by it once more."""
        with self._db.transaction():
            for some in chunks(replayed):
                done = self._db.execute(
                    "INSERT INTO replays SELECT model_id, ?, ?, id FROM rows "
                    f"WHERE fate = '{TRAINED}' AND id IN ({marks(some)})",
                    (incarnation, step, *some),
                )
                assert done.rowcount == len(some), "only trained rows are replayed"
            for some in chunks(row_ids):
                done = self._db.execute(
                    "UPDATE rows SET fate = ?, consumed_incarnation = ?, consumed_step = ? "
                    f"WHERE fate IS NULL AND id IN ({marks(some)})",
                    (TRAINED, incarnation, step, *some),
                )
                assert done.rowcount == len(some), "invariant 2: a row is trained once"

    def read(self, row_ids: Sequence[int]) -> list[Trajectory]:
        """See ``ledger_rows.read``."""
        return ledger_rows.read(self._db, row_ids)

    def oldest_versions(self, row_ids: Sequence[int]) -> list[dict[str, int]]:
        """Per row the version vector of its workflow: the oldest version number of each policy that took part in it."""
        found: dict[int, dict[str, int]] = {}
        for some in chunks(row_ids):
            query = f"SELECT id, versions FROM rows JOIN workflows USING (workflow_id) WHERE id IN ({marks(some)})"
            for row_id, text in self._db.execute(query, some):
                found[row_id] = {model: Version.parse(span[0]).number for model, span in json.loads(text).items()}
        return [found[row_id] for row_id in row_ids]

    def recover(self) -> Recovered:
        """Read back unfinished work after a start."""
        state = Recovered()
        (state.next_row_id,) = self._db.execute("SELECT 1 + coalesce(max(id), 0) FROM rows").fetchone()
        (state.next_close,) = self._db.execute("SELECT 1 + coalesce(max(closed), 0) FROM tasks").fetchone()
        state.open_tasks = dict(self._db.execute("SELECT task_key, members FROM tasks WHERE closed IS NULL"))
        for workflow_id, key, sample, status in self._db.execute(
            "SELECT workflow_id, task_key, sample, status FROM workflows JOIN tasks USING (task_key) "
            "WHERE closed IS NULL"
        ):
            if status is None:
                state.in_flight[workflow_id] = (key, sample)
            elif status != SUPERSEDED:
                state.terminal_samples.setdefault(key, set()).add(sample)
        state.waiting = self.waiting_rows()
        return state

    def waiting_rows(self, model_id: str | None = None) -> list[WaitingRow]:
        """Rows without a fate, in closing order of their tasks; those of open tasks come last."""
        return [
            WaitingRow(*columns)
            for columns in self._db.execute(
                f"SELECT {_WAITING} FROM rows JOIN tasks USING (task_key) "
                "WHERE fate IS NULL AND (?1 IS NULL OR model_id = ?1) "
                "ORDER BY closed IS NULL, closed, id",
                (model_id,),
            )
        ]

    def trained_rows(self, model_id: str, oldest: int) -> list[TrainedRow]:
        """Rows of trained groups without a token older than version ``oldest``, in the order of their training."""
        return [
            TrainedRow(*columns)
            for columns in self._db.execute(
                f"SELECT {_WAITING}, 1 + count(row_id), coalesce(max(step), consumed_step) FROM rows "
                "JOIN tasks USING (task_key) LEFT JOIN (SELECT row_id, step FROM replays) ON row_id = id "
                "WHERE model_id = ?1 AND fate = ?2 AND group_id NOT IN ("
                "SELECT group_id FROM rows WHERE model_id = ?1 AND fate = ?2 AND oldest < ?3) "
                "GROUP BY id ORDER BY consumed_step, closed, id",
                (model_id, TRAINED, oldest),
            )
        ]

    def counts(self) -> dict[str, dict[str | None, int]]:
        """See ``ledger_counts.by_fate``."""
        return ledger_counts.by_fate(self._db)

    def replay_counts(self) -> dict[str, int]:
        """See ``ledger_counts.replayed``."""
        return ledger_counts.replayed(self._db)

    def turn_counts(self) -> dict[str, dict[int, Counter[str]]]:
        """See ``ledger_counts.by_turns``."""
        return ledger_counts.by_turns(self._db)

    def issued_tasks(self) -> dict[int, set[int]]:
        """Tasks that were started, by epoch: the task cursor."""
        found: dict[int, set[int]] = {}
        for epoch, task in self._db.execute("SELECT epoch, task FROM tasks"):
            found.setdefault(epoch, set()).add(task)
        for (epoch,) in self._db.execute("SELECT epoch FROM started_tasks").fetchall():
            found.setdefault(epoch, set()).update(np.flatnonzero(started_tasks(self._db, epoch)).tolist())
        return found

    def _set_fates(self, changes: Iterable[FateChange]) -> None:
        for change in changes:
            for some in chunks(change.row_ids):
                done = self._db.execute(
                    f"UPDATE rows SET fate = ? WHERE fate IS NULL AND id IN ({marks(some)})", (change.fate, *some)
                )
                assert done.rowcount == len(some), "invariant 3: a row gets one fate"


def _columns(row: NewRow, task_key: str) -> tuple:
    t = row.trajectory
    span = t.version_span
    sampled = int(t.response_mask.sum())
    return (
        row.row_id,
        t.trajectory_id,
        t.workflow_id,
        task_key,
        t.model_id,
        t.agent_id,
        int(t.turn),
        t.request_id,
        row.group_id,
        t.finish_reason,
        None if t.reward is None else float(t.reward),
        sampled,
        len(t.prompt_ids) + len(t.response_ids) - sampled,
        int(t.incarnation),
        span.oldest.number,
        span.newest.number,
        row.turns,
        row.fate,
        None,
        None,
    )
