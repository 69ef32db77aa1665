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
"""The ingest process is killed before every SQL statement of an operation: all of it happened, or nothing did.

Each case is a real process that kills itself; the file it leaves is opened by a new ingestor (invariants 2, 3 and 4).
"""

import json
import subprocess
import sys
from collections import Counter

import pytest

from ...ingest.ledger_report import open_ledger
from ...trajectory import Version, WorkflowId
from ..fakes.workflow_records import PLANNER, SOLVER, queue_spec, record, trajectory, with_ingestor, workflow_stats

pytestmark = pytest.mark.slow

V0 = Version(1, 0)


def _crashes(folder, operation: str) -> list[tuple[int, list[str], bool]]:
    """For every statement of the operation: its number, what was acknowledged, whether the process was killed."""
    done = subprocess.run(
        [sys.executable, "-m", "recipe.multi_policy_async.tests.fakes.killed_ingestor", str(folder), operation],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def _after(folder):
    """The books of a new ingestor on the same file, and the ids it hands out."""

    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(max_queue_groups=2), True)
        stats, unfinished = await ingestor.stats(), await ingestor.unfinished()
        assert all(each["unaccounted"] == 0 for each in stats.values()), "invariant 3"
        await ingestor.end_of_data()
        taken = {}
        for model_id in (PLANNER, SOLVER):
            batch = await ingestor.take(model_id, 10, V0, 0.01)
            groups = getattr(batch, "groups", ())
            taken[model_id] = [row.trajectory_id for group in groups for row in group.trajectories]
            assert len(set(taken[model_id])) == len(taken[model_id]), "invariant 2"
        if unfinished:  # the workflow's end was lost with the process: it is run again, and ends once
            ((ids, members),) = unfinished.values()
            for workflow_id in ids:
                await ingestor.issue(workflow_id, members)
                await ingestor.ingest(record(workflow_id, trajectory(workflow_id)))
        return stats, unfinished, taken, workflow_stats(ingestor)

    return with_ingestor(folder, scenario)


def _books(stats) -> dict:
    return {
        model_id: (each["accepted"], each["trained"], each["open"] + each["queued"], each["dropped"])
        for model_id, each in stats.items()
    }


BEFORE = {PLANNER: (5, 0, 5, {}), SOLVER: (4, 0, 4, {})}
# Books of a new process: a fresh start has lost the weights, so what was trained waits again.
AFTER = {
    "ingest": {PLANNER: (6, 0, 4, {"surplus": 2}), SOLVER: (5, 0, 4, {"group_too_small": 1})},
    "consume": BEFORE,
    "retire": {PLANNER: (5, 0, 5, {}), SOLVER: (4, 0, 0, {"retired": 4})},
    "register": BEFORE,
    "prune": {PLANNER: (5, 0, 3, {"non_finite": 2}), SOLVER: (4, 0, 4, {})},
}


@pytest.mark.parametrize("operation", sorted(AFTER))
def test_a_kill_at_any_statement_leaves_all_of_an_operation_or_nothing(tmp_path, operation):
    crashes = _crashes(tmp_path, operation)
    assert [killed for _, _, killed in crashes] == [True] * (len(crashes) - 1) + [False] and len(crashes) > 3
    happened = []
    for statement, acknowledged, _ in crashes:
        stats, unfinished, _, workflows = _after(tmp_path / str(statement))
        books = _books(stats)
        happened.append(books == AFTER[operation])
        assert books in (BEFORE, AFTER[operation]), (statement, books)
        if operation in acknowledged:
            assert books == AFTER[operation], "what was acknowledged survives"
        assert bool(unfinished) == (operation != "ingest" or books == BEFORE), "invariant 4"
        assert workflows["in_flight"] == 0 and workflows["open_tasks"] == 0
    if AFTER[operation] != BEFORE:
        assert happened == sorted(happened), "it happens at one point and stays"


# What the planner's weights have seen, and what waits for them, by the checkpoint that a new process finds.
AT_THE_FIRST = ({"e0-t0"}, ["e0-t1", "e0-t3", "e0-t4"])
AT_THE_SECOND = ({"e0-t0", "e0-t1"}, ["e0-t3", "e0-t4"])


def _after_restore(folder):
    """A new process goes on at the newest checkpoints: what was trained, and what can be taken, by task."""

    async def scenario(ingestor):
        newest = {model: (incarnation, step) for model, incarnation, step, _, _ in await ingestor.checkpoints()}
        versions = {}
        for model_id, restored in newest.items():
            incarnation = await ingestor.register_policy(model_id, queue_spec(), True, restored=restored)
            versions[model_id] = Version(incarnation, restored[1])
        ((ids, members),) = (await ingestor.unfinished()).values()
        assert ids == ["e0-t4-s1-a1"], "invariant 4: one member has its record, the other one is played again"
        for workflow_id in ids:
            await ingestor.issue(workflow_id, members)
            await ingestor.ingest(record(workflow_id, trajectory(workflow_id, version=1)))
        await ingestor.end_of_data()
        taken = {}
        for model_id, version in versions.items():
            batch = await ingestor.take(model_id, 10, version, 0.01)
            rows = [row for group in getattr(batch, "groups", ()) for row in group.trajectories]
            taken[model_id] = Counter(WorkflowId.parse(row.workflow_id).task_key for row in rows)
            assert len({row.trajectory_id for row in rows}) == len(rows), "invariant 2"
        return newest[PLANNER], taken, await ingestor.stats()

    at, taken, stats = with_ingestor(folder, scenario)
    with open_ledger(folder / "ledger.sqlite") as db:
        query = "SELECT DISTINCT task_key FROM rows WHERE model_id = ? AND fate = 'trained'"
        trained = {model: {row["task_key"] for row in db.execute(query, (model,))} for model in (PLANNER, SOLVER)}
    assert all(each["unaccounted"] == 0 for each in stats.values()), "invariant 3"
    return at, trained, taken, stats


def test_a_kill_while_a_policy_is_restored_loses_no_row_and_trains_none_twice(tmp_path):
    """Invariants 2, 3 and 4: rows already consumed wait again exactly if the surviving weights have not seen them."""
    crashes = _crashes(tmp_path, "restore")
    assert [killed for _, _, killed in crashes] == [True] * (len(crashes) - 1) + [False]
    seen = set()
    for statement, acknowledged, _ in crashes:
        (incarnation, step), trained, taken, stats = _after_restore(tmp_path / str(statement))
        saved = step == 2
        assert saved or "saved" not in acknowledged, "what was acknowledged survives"
        seen.add((saved, "restored" in acknowledged, "trained" in acknowledged))
        tasks, waiting = AT_THE_SECOND if saved else AT_THE_FIRST
        assert trained[PLANNER] == tasks and taken[PLANNER] == {task: 2 for task in waiting}, (statement, acknowledged)
        assert stats[PLANNER]["accepted"] == 10 and stats[PLANNER]["dropped"] == {"rolled_back": 2}
        assert trained[SOLVER] == {"e0-t0"} and not taken[SOLVER], "invariant 7"
    assert len(seen) == 4, "killed while it was restored, while it trained, while it was saved, and not at all"
