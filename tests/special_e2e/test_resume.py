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
"""A job that was killed goes on in its run directory, and a policy that died within a job: what the surviving weights
have seen is trained once."""

import json
import sqlite3
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.e2e

POLICIES = ("planner_model", "solver_model")
TARGET, EVERY = 8, 2
SETTINGS = (f"stop.updates={TARGET}", f"checkpoint.every_updates={EVERY}", "checkpoint.keep=2")


def query(run_dir: Path, text: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        return ledger.execute(text).fetchall()


def trained_rows(run_dir: Path, policy: str) -> dict[tuple[int, int], int]:
    """Rows that the ledger marks as trained, by (incarnation, version)."""
    found = query(
        run_dir,
        "SELECT consumed_incarnation, consumed_step, sum(n) FROM ("
        f"SELECT *, 1 AS n FROM rows WHERE model_id = '{policy}' AND fate = 'trained') GROUP BY 1, 2 "
        "UNION ALL SELECT consumed_incarnation, consumed_step, rows FROM pruned "
        f"WHERE model_id = '{policy}' AND fate = 'trained'",
    )
    counts: dict[tuple[int, int], int] = {}
    for incarnation, step, rows in found:
        counts[incarnation, step] = counts.get((incarnation, step), 0) + rows
    return counts


def reported_rows(run_dir: Path, policy: str) -> dict[tuple[int, int], int]:
    """Rows that the trainer says it trained, by (incarnation, version)."""
    steps = map(json.loads, (run_dir / "metrics" / "steps.jsonl").read_text().splitlines())
    return {(each["incarnation"], each["version"]): each["rows"] for each in steps if each["model_id"] == policy}


def wait_for_checkpoints(job) -> None:
    """Until each policy has a checkpoint, and weights beyond it that will be lost."""
    seen: set[str] = set()
    while len(seen) < len(POLICIES):
        seen.add(job.wait_for_line(r"_model\s+version\s+[3-8] ").split("]")[1].split()[0])


def check_lineage(run_dir: Path, policy: str) -> int:
    """Every version of the surviving weights was trained once, on whole batches; returns the version restored."""
    origin = f"SELECT restored_step FROM incarnations WHERE model_id = '{policy}' AND incarnation = 1"
    ((restored,),) = query(run_dir, origin)
    assert restored is not None and restored > 0 and restored % EVERY == 0
    lineage = [(0, v) for v in range(1, restored + 1)] + [(1, v) for v in range(restored + 1, TARGET + 1)]
    trained, reported = trained_rows(run_dir, policy), reported_rows(run_dir, policy)
    assert sorted(trained) == lineage, "nothing is marked with a step that the surviving weights have not done"
    for step in lineage:  # the kill may fall between a save and the report of its step
        assert trained[step] == reported.get(step, trained[step]), "every batch was marked whole"
    assert [v for i, v in reported if i == 1] == list(range(restored + 1, TARGET + 1)), "versions go on"
    return restored


def check_optimizer(run_dir: Path, policy: str) -> None:
    """The optimizer went on too: one update per version, over both lives."""
    ((path,),) = query(run_dir, f"SELECT path FROM checkpoints WHERE model_id = '{policy}' AND step = {TARGET}")
    state = torch.load(run_dir / path / "actor" / "optim_world_size_1_rank_0.pt", weights_only=False)["state"]
    assert {int(each["step"]) for each in state.values()} == {TARGET}


def test_a_killed_job_goes_on_and_the_surviving_weights_see_no_row_twice(start_job):
    """Invariants 2, 3 and 8."""
    job = start_job(*SETTINGS)
    wait_for_checkpoints(job)
    job.kill()
    run_dir = job.run_dir
    before = {policy: trained_rows(run_dir, policy) for policy in POLICIES}

    again = start_job(*SETTINGS, "run.resume=true", run_dir=run_dir)
    assert again.wait(timeout_s=300) == 0, "\n".join(again.lines[-20:])
    assert again.left_behind() == []

    for policy in POLICIES:
        restored = check_lineage(run_dir, policy)
        check_optimizer(run_dir, policy)
        after = trained_rows(run_dir, policy)
        assert all(after[0, v] == before[policy][0, v] for v in range(1, restored + 1))
        kept = query(run_dir, f"SELECT step, path FROM checkpoints WHERE model_id = '{policy}' ORDER BY step")
        assert [step for step, _ in kept] == [TARGET - EVERY, TARGET], "checkpoint.keep"
        on_disk = {str(path.relative_to(run_dir)) for path in run_dir.glob(f"checkpoints/{policy}/*/global_step_*")}
        assert on_disk == {path for _, path in kept}


def test_a_dead_policy_starts_again_while_the_other_goes_on(start_job):
    """Invariants 2, 7 and 8."""
    job = start_job(*SETTINGS, "supervision.restarts=1")
    wait_for_checkpoints(job)
    ranks = [each for each in job.processes() if each.name().startswith("ray::WorkerDict")]
    ranks[0].kill()
    note = job.wait_for_line(r"starts again from version")
    assert job.wait(timeout_s=300) == 0, "\n".join(job.lines[-20:])
    assert job.left_behind() == []

    (dead,) = [policy for policy in POLICIES if f"{policy} starts again" in note]
    (other,) = [policy for policy in POLICIES if policy != dead]
    check_lineage(job.run_dir, dead)
    check_optimizer(job.run_dir, dead)
    assert query(job.run_dir, f"SELECT incarnation FROM incarnations WHERE model_id = '{other}'") == [(0,)]
    assert list(reported_rows(job.run_dir, other)) == [(0, version) for version in range(1, TARGET + 1)]
