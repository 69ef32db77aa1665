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
"""Tables of the ledger."""

from ..trajectory import WORKFLOW_STATUSES
from .reasons import ABANDON_REASONS, FATES

SCHEMA_VERSION = 4

LEDGER_ID = "ledger_id"
"""Key in ``meta`` of what tells this file from every other ledger."""

SUPERSEDED = "superseded"
"""Status of an attempt that a later one replaced; not terminal."""


def _in(values: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{value}'" for value in values) + ")"


SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- One per (epoch, task): how many workflows its groups wait for, and in which order groups were closed.
CREATE TABLE tasks (
    task_key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, task INTEGER NOT NULL, members INTEGER NOT NULL,
    closed INTEGER UNIQUE
) WITHOUT ROWID;

-- One per started workflow. No status: in flight.
CREATE TABLE workflows (
    workflow_id TEXT PRIMARY KEY, task_key TEXT NOT NULL REFERENCES tasks, sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL, issued_at REAL NOT NULL,
    status TEXT CHECK (status IN {_in((*WORKFLOW_STATUSES, SUPERSEDED))}),
    digest BLOB, answer TEXT, score REAL, error TEXT, started_at REAL, ended_at REAL, versions TEXT
) WITHOUT ROWID;
CREATE UNIQUE INDEX one_terminal_attempt ON workflows (task_key, sample)
    WHERE status IS NOT NULL AND status != '{SUPERSEDED}';
CREATE INDEX attempts ON workflows (task_key, sample, attempt);

-- One per trajectory. No fate: it waits (its group is open, queued or taken).
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL UNIQUE, workflow_id TEXT NOT NULL REFERENCES workflows,
    task_key TEXT NOT NULL, model_id TEXT NOT NULL, agent_id TEXT NOT NULL, turn INTEGER NOT NULL,
    request_id TEXT NOT NULL, group_id TEXT NOT NULL, finish_reason TEXT NOT NULL, reward REAL,
    sampled_tokens INTEGER NOT NULL, context_tokens INTEGER NOT NULL,
    incarnation INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL, turns INTEGER NOT NULL,
    fate TEXT CHECK (fate IN {_in(FATES)}),
    consumed_incarnation INTEGER, consumed_step INTEGER,
    CHECK ((fate IS 'trained') = (consumed_step IS NOT NULL)),
    CHECK ((consumed_step IS NULL) = (consumed_incarnation IS NULL))
);
CREATE INDEX rows_of_workflow ON rows (workflow_id);
CREATE INDEX rows_of_task ON rows (task_key);
CREATE INDEX rows_by_fate ON rows (model_id, fate);
CREATE INDEX trained_rows ON rows (model_id, consumed_incarnation, consumed_step) WHERE fate = 'trained';

-- Further batches that a trained row was in (replay.py), by the version that they led to.
CREATE TABLE replays (
    model_id TEXT NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL,
    row_id INTEGER NOT NULL REFERENCES rows, PRIMARY KEY (model_id, incarnation, step, row_id)
) WITHOUT ROWID;
CREATE INDEX replays_of_row ON replays (row_id);

-- Token arrays (row_codec), apart so that scans of rows stay small.
CREATE TABLE payloads (row_id INTEGER PRIMARY KEY REFERENCES rows, body BLOB NOT NULL);

-- Images that rows show (ledger_images.py), each once; in the order of their placeholders in the row.
CREATE TABLE images (digest BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE row_images (
    row_id INTEGER NOT NULL REFERENCES rows, position INTEGER NOT NULL, digest BLOB NOT NULL REFERENCES images,
    PRIMARY KEY (row_id, position)
) WITHOUT ROWID;
CREATE INDEX rows_of_image ON row_images (digest);

-- A model's checkpoint is committed by its row here, written after its files.
CREATE TABLE checkpoints (
    model_id TEXT NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, digest TEXT NOT NULL,
    path TEXT NOT NULL, saved_at REAL NOT NULL, PRIMARY KEY (model_id, incarnation, step)
) WITHOUT ROWID;

-- One per start or restore of a model; weights above restored_step of earlier incarnations are lost.
CREATE TABLE incarnations (
    model_id TEXT NOT NULL, incarnation INTEGER NOT NULL, restored_incarnation INTEGER, restored_step INTEGER,
    started_at REAL NOT NULL, PRIMARY KEY (model_id, incarnation)
) WITHOUT ROWID;

-- Moving averages of rewards (baselines.py).
CREATE TABLE baselines (
    model_id TEXT NOT NULL, agent_id TEXT NOT NULL, rewards INTEGER NOT NULL, mean REAL NOT NULL,
    variance REAL NOT NULL, PRIMARY KEY (model_id, agent_id)
) WITHOUT ROWID;

-- Sampled tokens that never became rows.
CREATE TABLE abandoned (
    model_id TEXT NOT NULL, reason TEXT NOT NULL CHECK (reason IN {_in(ABANDON_REASONS)}),
    tokens INTEGER NOT NULL, PRIMARY KEY (model_id, reason)
) WITHOUT ROWID;

-- Counts of what was pruned (ledger_prune.py), by class of turns (turns.py). -1: not consumed.
CREATE TABLE pruned (
    model_id TEXT NOT NULL, fate TEXT NOT NULL, consumed_incarnation INTEGER NOT NULL, consumed_step INTEGER NOT NULL,
    turns INTEGER NOT NULL, rows INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL,
    PRIMARY KEY (model_id, fate, consumed_incarnation, consumed_step, turns)
) WITHOUT ROWID;
CREATE TABLE pruned_replays (
    model_id TEXT NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, uses INTEGER NOT NULL,
    PRIMARY KEY (model_id, incarnation, step)
) WITHOUT ROWID;
CREATE TABLE pruned_workflows (status TEXT PRIMARY KEY, workflows INTEGER NOT NULL) WITHOUT ROWID;

-- Tasks that were started and pruned, one bit each: part of the task cursor.
CREATE TABLE started_tasks (epoch INTEGER PRIMARY KEY, tasks BLOB NOT NULL);
"""
