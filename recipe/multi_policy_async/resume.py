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
"""Which checkpoint every policy of a run goes on from, or why the run cannot be gone on with.

Checked before Ray starts, and all problems are told at once. The ledger says which checkpoints there are; the manifest
beside their files says to which ledger they belong.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .checkpoint_coordinator import FOLDER, MANIFEST, SavedCheckpoint, damage_of
from .configuration.errors import ConfigError, Problem
from .configuration.resume_checks import changed_settings
from .configuration.schema import JobSpec
from .ingest import ledger_report
from .ledger import LEDGER_FILE
from .run_directory import CONFIG, data_digests

Plan = Mapping[str, SavedCheckpoint | None]
"""Trained model -> the checkpoint it goes on from; ``None``: its initial weights."""


def plan_resume(job: JobSpec) -> Plan:
    """Choose every trained policy's checkpoint and check that it can be restored.

    Raises:
        ConfigError: names every reason why the run cannot be gone on with.
    """
    problems = list(changed_settings(job, data_digests(job), job.run.dir / CONFIG))
    problems += _resume_at_problems(job)
    plan, found = _from_ledger(job)
    if problems or found:
        raise ConfigError([*problems, *found])
    return plan


def describe(plan: Plan) -> list[str]:
    """One line per policy, for people."""
    return [
        f"{model_id} goes on from "
        + ("its initial weights" if saved is None else f"version {saved.step} ({saved.path})")
        for model_id, saved in plan.items()
    ]


def _resume_at_problems(job: JobSpec) -> list[Problem]:
    """``run.resume_at`` names trained models of this job."""
    return [
        Problem(f"run.resume_at.{model_id}", "names no trained model", allowed=", ".join(job.trained))
        for model_id in job.run.resume_at
        if model_id not in job.trained
    ]


def _from_ledger(job: JobSpec) -> tuple[Plan, list[Problem]]:
    path, manifest = job.run.dir / LEDGER_FILE, job.run.dir / FOLDER / MANIFEST
    if not path.exists() and not manifest.exists():  # the run ended before its ledger began
        missing = [
            Problem(f"run.resume_at.{m}", "there is no checkpoint", v) for m, v in job.run.resume_at.items() if v
        ]
        return dict.fromkeys(job.trained), missing
    plan: dict[str, SavedCheckpoint | None] = {}
    problems: list[Problem] = []
    try:
        with ledger_report.open_ledger(path) as ledger:
            problems += _identity_problems(ledger, manifest)
            for model_id in job.trained:
                plan[model_id], found = _choose(ledger, model_id, job.run.resume_at.get(model_id))
                problems += found
    except (ValueError, sqlite3.DatabaseError) as error:
        return {}, [Problem("run.dir", f"its ledger cannot be read: {error}", str(job.run.dir))]
    with ThreadPoolExecutor() as threads:  # hashing is outside the interpreter's lock
        checked = threads.map(lambda saved: list(_file_problems(job.run.dir, saved)), filter(None, plan.values()))
    return plan, [*problems, *(problem for found in checked for problem in found)]


def _identity_problems(ledger: sqlite3.Connection, manifest: Path) -> Iterator[Problem]:
    if not manifest.exists():
        if ledger_report.checkpoints(ledger):
            yield Problem("run.dir", "its checkpoints have no manifest", str(manifest))
        return
    try:
        belongs_to = json.loads(manifest.read_text())["ledger_id"]
    except (ValueError, KeyError, TypeError) as error:
        yield Problem("run.dir", f"the manifest of its checkpoints cannot be read: {error!r}", str(manifest))
        return
    if belongs_to != ledger_report.ledger_id(ledger):
        yield Problem("run.dir", f"its checkpoints belong to another ledger than {LEDGER_FILE}", str(manifest))


def _choose(ledger: sqlite3.Connection, model_id: str, at: int | None) -> tuple[SavedCheckpoint | None, list[Problem]]:
    """The checkpoint of version ``at``, or the newest; ``None`` stands for the initial weights."""
    known = [SavedCheckpoint(**row) for row in ledger_report.checkpoints(ledger) if row["model_id"] == model_id]
    if at is not None and at > 0:
        for saved in known:
            if saved.step == at:  # numbers are unique, since a restore gives up the branch that it leaves
                return saved, []
        allowed = ", ".join(str(saved.step) for saved in known) or "0"
        return None, [Problem(f"run.resume_at.{model_id}", "is no checkpoint of the ledger", at, allowed=allowed)]
    if known and at is None:
        return known[-1], []
    if ledger_report.is_pruned_beyond_start(ledger, model_id):
        what = "the ledger is pruned behind its checkpoints, so it cannot start from its initial weights"
        allowed = ", ".join(str(saved.step) for saved in known) or None
        return None, [Problem(f"run.resume_at.{model_id}", what, at or 0, allowed=allowed, fix="or start a new run")]
    return None, []


def _file_problems(run_dir: Path, saved: SavedCheckpoint) -> Iterator[Problem]:
    folder = (run_dir / saved.path).resolve()
    if not folder.is_relative_to(run_dir.resolve()):
        yield Problem("run.dir", f"a checkpoint of {saved.model_id} lies in another run's folder", str(folder))
    elif damage := damage_of(saved, run_dir):
        fix = "restore the files, or name an older version here"
        yield Problem(f"run.resume_at.{saved.model_id}", f"version {saved.step} {damage}", str(folder), fix=fix)
