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
"""A finished co-training, read back from its files: trained is what was sampled, once, by the right weights."""

import json
import sqlite3
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

POLICIES = ("planner_model", "solver_model")
LOG_PROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def runs():
    return {}


def finished(start_job, runs: dict[str, Path], name: str, *overrides: str) -> Path:
    """Run a job once per module; several tests read it."""
    if name not in runs:
        job = start_job(*overrides)
        assert job.wait(timeout_s=300) == 0, "\n".join(job.lines[-20:])
        runs[name] = job.run_dir
    return runs[name]


def on_policy(start_job, runs) -> Path:
    """Production never runs ahead, every sync is checked by checksum, the trainer recomputes all log-probs."""
    return finished(
        start_job,
        runs,
        "on_policy",
        "stop.updates=4",
        "ingest.admission=all",  # else the policy that is ready first starts tasks for the other one too
        "policy_defaults.async_training.staleness_threshold=0",
        "policy_defaults.algorithm.rollout_correction.bypass_mode=false",
        "policy_defaults.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.checksum=true",
        "multi_model.models.planner_model.trainer.n_gpus=2",
        "multi_model.models.planner_model.rollout.n_gpus=2",
    )


def ahead(start_job, runs) -> Path:
    return finished(
        start_job,
        runs,
        "ahead",
        "stop.updates=6",
        "policy_defaults.async_training.max_staleness=1",
        "data.val_max_samples=8",
        "validation.every_updates=3",
        "validation.pin=hold_syncs",
    )


def rows(run_dir: Path, query: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        return ledger.execute(query).fetchall()


def metrics(run_dir: Path, policy: str, name: str) -> list[float]:
    lines = (run_dir / "metrics" / f"{policy}.jsonl").read_text().splitlines()
    values = [json.loads(line)["data"].get(f"{policy}/{name}") for line in lines]
    return [value for value in values if value is not None]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_servers_log_probs_agree_with_the_trainers(start_job, runs, policy):
    """With two ranks and two replicas of the planner; the job itself fails if a served checksum differs."""
    differences = metrics(on_policy(start_job, runs), policy, "training/rollout_probs_diff_max")
    assert len(differences) == 4
    assert max(differences) < LOG_PROB_TOLERANCE


def test_the_answers_after_a_sync_carry_the_new_version(start_job, runs):
    """Invariant 5: on policy, every row that version v was trained on was sampled by version v - 1, all of it."""
    spans = rows(on_policy(start_job, runs), "SELECT oldest, newest, consumed_step FROM rows WHERE fate = 'trained'")
    assert {step for _, _, step in spans} == {1, 2, 3, 4}
    assert all(oldest == newest == step - 1 for oldest, newest, step in spans)


def test_no_row_is_trained_beyond_the_staleness_bound(start_job, runs):
    """Invariant 6."""
    stale = rows(
        ahead(start_job, runs), "SELECT max(consumed_step - 1 - oldest), count(*) FROM rows WHERE fate = 'trained'"
    )
    (worst, trained) = stale[0]
    assert trained > 0
    assert worst <= 1


def test_every_started_workflow_has_one_terminal_record(start_job, runs):
    """Invariant 4."""
    run_dir = ahead(start_job, runs)
    started, ended = rows(run_dir, "SELECT count(*), count(status) FROM workflows")[0]
    assert started > 0
    assert started == ended


@pytest.mark.parametrize("policy", POLICIES)
def test_every_accepted_row_is_accounted_for(start_job, runs, policy):
    """Invariant 3, on disk after the job: trained rows are whole batches, all others have a reason."""
    fates = dict(
        rows(ahead(start_job, runs), f"SELECT fate, count(*) FROM rows WHERE model_id = '{policy}' GROUP BY fate")
    )
    assert None not in fates
    assert fates["trained"] > 0


def test_the_whole_team_is_evaluated_before_during_and_after_training_by_one_version_of_each_policy(start_job, runs):
    """``pin: hold_syncs``; and nothing of it is in the ledger."""
    run_dir = ahead(start_job, runs)
    evaluations = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]
    assert all(each["failed"] == 0 and each["first"] == each["last"] for each in evaluations)
    assert evaluations[0]["first"] == dict.fromkeys(POLICIES, "0.0")
    assert any("0.0" < min(each["first"].values()) < "0.6" for each in evaluations)
    assert evaluations[-1]["first"] == dict.fromkeys(POLICIES, "0.6")
    assert rows(run_dir, "SELECT count(*) FROM workflows WHERE workflow_id LIKE 'eval%'") == [(0,)]


def test_both_policies_reach_every_version_up_to_their_target(start_job, runs):
    lines = (ahead(start_job, runs) / "metrics" / "steps.jsonl").read_text().splitlines()
    versions: dict[str, list[int]] = {}
    for step in map(json.loads, lines):
        versions.setdefault(step["model_id"], []).append(step["version"])
    assert versions == {policy: [1, 2, 3, 4, 5, 6] for policy in POLICIES}
