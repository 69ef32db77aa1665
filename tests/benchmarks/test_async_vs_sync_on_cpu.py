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
"""What the comparison of asynchronous and synchronous jobs makes of the files of a run."""

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.async_vs_sync.compare import command
from benchmarks.async_vs_sync.measured import CORES, CPU_FILE, JobRun, measure
from benchmarks.async_vs_sync.report import bounds, run_lines, summary
from benchmarks.async_vs_sync.slow_tool import SlowTool
from recipe.multi_policy_async.ingest.ledger_schema import SCHEMA
from recipe.multi_policy_async.simulator.measured import SERVING, TRAINING, WORKFLOWS
from recipe.multi_policy_async.simulator.report import MODES

ROWS = 8  # of a batch, and workflows of a version
SYNC_S = 0.5


def write_run(
    run_dir: Path, *, period: float = 4.0, train_s: float = 2.0, cores_used: float = 1.0, machine: float = 1.0
) -> Path:
    """A job of six versions, one per ``period`` from second 100 on, and a frozen judge; workflows last one second."""
    (run_dir / "config").mkdir(parents=True)
    policy = {"train": True, "rollout_gpus": 2, "gpus_per_replica": 1}
    models = {"solver": policy, "judge": policy | {"train": False}}
    job = {"models": models, "workflow": {"max_concurrent": 10}, "ingest": {"admission": "any"}}
    write_yaml(run_dir / "config" / "job.yaml", job)
    for model_id in models:
        rollout = {"max_num_seqs": 16}
        write_yaml(run_dir / "config" / f"{model_id}.yaml", {"actor_rollout_ref": {"rollout": rollout}})
    ends = [100 + period * version for version in range(6)]
    steps = [
        {
            "model_id": "solver", "version": version, "time": end, "train_seconds": train_s, "rows": ROWS,
            "staleness_mean": 1.5, "staleness_max": version,
        }
        for version, end in enumerate(ends, start=1)
    ]  # fmt: skip
    syncs = [
        {"step": step["version"], "data": {"solver/timing_s/timing_s/param_sync": SYNC_S, "solver/x": 1}}
        for step in steps
    ]
    write_lines(run_dir / "metrics" / "steps.jsonl", steps)
    write_lines(run_dir / "metrics" / "solver.jsonl", [*syncs, {"step": 0, "data": {}}])
    sample = {"running": 8, "waiting_for_slot": 0, "queue_groups": 2}
    write_lines(
        run_dir / "metrics" / "pipeline.jsonl",
        [{"time": 90 + second, "models": {model_id: sample for model_id in models}} for second in range(60)],
    )
    readings = [
        {
            "time": 95.0 + second, "cores": 2, "machine": 7 + machine * second,
            "by_process": {"ray::WorkerDict": 5 + 0.75 * cores_used * second, "bash": 0.25 * cores_used * second},
        }
        for second in range(60)
    ]  # fmt: skip
    write_lines(run_dir / CPU_FILE, readings)
    write_ledger(run_dir / "ledger.sqlite", [end - 0.5 for end in ends for _ in range(ROWS)])
    return run_dir


def write_ledger(file: Path, ends: list[float]) -> None:
    """Workflows that call both models; of eight rows of the solver one is dropped as small, one came too late."""
    ledger = sqlite3.connect(file)
    ledger.executescript(SCHEMA)
    ledger.execute("INSERT INTO tasks VALUES ('e0-t0', 0, 0, 1, NULL)")
    for number, end in enumerate(ends):
        name = f"e0-t0-s{number}-a0"
        ledger.execute(
            "INSERT INTO workflows (workflow_id, task_key, sample, attempt, issued_at, status, ended_at)"
            " VALUES (?, 'e0-t0', ?, 0, ?, 'ok', ?)",
            (name, number, end - 1, end),
        )
        for model_id in ("solver", "judge"):
            fate = "recorded" if model_id == "judge" else ("group_too_small", "retired", *["trained"] * 6)[number % 8]
            step = 1 if fate == "trained" else None
            ledger.execute(
                "INSERT INTO rows (trajectory_id, workflow_id, task_key, model_id, agent_id, turn, request_id,"
                " group_id, finish_reason, sampled_tokens, context_tokens, incarnation, oldest, newest, turns, fate,"
                " consumed_incarnation, consumed_step) VALUES (?, ?, 'e0-t0', ?, 'a', 0, '', '', 'stop', 1, 1, 0, 0, 0,"
                " 1, ?, ?, ?)",
                (f"{name}-{model_id}", name, model_id, fate, None if step is None else 0, step),
            )
    ledger.commit()
    ledger.close()


def write_yaml(file: Path, content: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(content))


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_one_late(run_dir: Path) -> Path:
    """A second policy begins when the first has ended."""
    write_run(run_dir)
    job = yaml.safe_load((run_dir / "config" / "job.yaml").read_text())
    job["models"]["judge"]["train"] = True
    write_yaml(run_dir / "config" / "job.yaml", job)
    file = run_dir / "metrics" / "steps.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    write_lines(file, [*steps, *(step | {"model_id": "judge", "time": step["time"] + 100} for step in steps)])
    return run_dir


@pytest.fixture
def job(tmp_path: Path) -> JobRun:
    return measure(write_run(tmp_path / "run"), skip=2)


class TestOneRun:
    def test_starting_and_the_first_versions_are_left_out(self, job):
        assert job.seconds == 16  # from the end of version 2 to that of version 6

    def test_a_version_takes_what_lies_between_two_ends(self, job):
        assert job.seconds_per_version == {"solver": 4}
        assert job.policies["solver"].trained_rate == ROWS / 4

    def test_a_trainers_time_is_split_into_waiting_training_and_syncing(self, job):
        phases = job.policies["solver"].phases
        assert phases == pytest.approx({"wait": 2 / 4, "train": 1.5 / 4, "hold": 0, "sync": SYNC_S / 4})

    def test_workflows_and_calls_are_those_that_ended_meanwhile(self, job):
        assert job.workflow_rate == pytest.approx(ROWS / 4)
        assert job.slots_in_use == pytest.approx(ROWS * 1.0 / 4)
        assert job.policies["solver"].call_rate == pytest.approx(ROWS / 4)

    def test_rows_that_no_trainer_may_have_are_not_supply(self, job):
        assert job.policies["solver"].trainable_rate == pytest.approx((ROWS - 1) / 4)
        assert job.policies["solver"].dropped == {"group_too_small": 4}

    def test_the_machine_did_other_work_too_if_it_used_more_cores_than_the_job(self, job):
        assert job.disturbance == 0
        assert replace(job, machine=1.6).disturbance == pytest.approx(0.6)

    def test_serving_is_the_share_of_all_replicas_slots(self, job):
        assert job.policies["solver"].serving_busy == 8 / 32

    def test_a_frozen_policy_serves_and_trains_nothing(self, job):
        assert list(job.trained) == ["solver"]
        assert job.policies["judge"].phases == job.policies["judge"].dropped == {}
        assert job.policies["judge"].call_rate == pytest.approx(ROWS / 4)

    def test_staleness_is_that_of_the_rows_that_were_trained_meanwhile(self, job):
        assert (job.policies["solver"].staleness_mean, job.policies["solver"].staleness_max) == (1.5, 6)

    def test_cores_in_use_are_told_by_stage(self, job):
        assert job.cpu == pytest.approx({"training": 0.75, "others": 0.25})
        assert job.cores_busy == pytest.approx(0.5)

    def test_the_cores_allow_what_they_would_do_if_never_idle(self, job):
        assert job.workflow_bounds[CORES] == pytest.approx(2 * ROWS / 4)

    def test_too_few_versions_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="no more than 6 versions"):
            measure(write_run(tmp_path / "run"), skip=6)

    def test_policies_that_never_trained_together_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="judge made fewer than two versions"):
            measure(write_one_late(tmp_path / "run"), skip=2)


class TestComparison:
    def _pair(self, tmp_path: Path, **slow: float) -> dict[str, list[JobRun]]:
        fast = measure(write_run(tmp_path / "fast", period=4.0), skip=2)
        return dict(zip(MODES, ([fast], [measure(write_run(tmp_path / "slow", **slow), skip=2)]), strict=True))

    def test_the_speed_up_is_the_ratio_of_rates(self, tmp_path):
        line = next(line for line in summary(self._pair(tmp_path, period=6.0)).splitlines() if "rows/s" in line)
        assert line.split()[-2:] == ["1.50", "1.50x"]

    def test_of_several_rounds_the_median_counts(self, tmp_path):
        runs = self._pair(tmp_path, period=6.0)
        faster, slower = (replace(runs[MODES[0]][0], workflow_rate=rate) for rate in (20.0, 0.1))
        runs = {MODES[0]: [*runs[MODES[0]], faster, slower], MODES[1]: runs[MODES[1]] * 3}
        line = next(line for line in summary(runs).splitlines() if line.startswith("workflows/s"))
        assert line.split()[-1] == "1.50x"

    def test_busy_cores_are_named_and_free_ones_too(self, tmp_path):
        fast, slow = bounds(self._pair(tmp_path, period=6.0, machine=1.9))
        assert fast.endswith("cores were free, 50% busy")
        assert slow.endswith("all stages by the cores, 95% busy")

    def test_what_bounds_a_mode_is_read_from_its_least_disturbed_run(self, tmp_path):
        runs = self._pair(tmp_path, period=6.0)
        runs[MODES[0]].insert(0, replace(runs[MODES[0]][0], machine=2.0))
        assert bounds(runs)[0].endswith("50% busy")

    def test_a_run_is_told_with_the_simulators_columns(self, job):
        text = run_lines(job)
        assert "of bound" in text and f"{CORES} 4.00/s" in text
        assert job.policies["solver"].bound_by in (TRAINING, SERVING, WORKFLOWS)


class TestJobs:
    def test_the_modes_differ_in_their_schedule_only(self, tmp_path):
        fast, slow = (set(command("planner_solver_tiny", mode, tmp_path, 9, [])) for mode in MODES)
        assert fast ^ slow == {"ingest.schedule=all", "ingest.schedule=sync"}

    def test_the_tool_waits_between_planner_and_solver(self, monkeypatch):
        seen: list[Any] = []

        class Agent:
            async def chat(self, messages):
                seen.append(messages[-1]["content"])
                return "1"

        async def sleep(seconds):
            seen.append(seconds)

        class OneTask:
            question = "1 + 0"

            async def score(self, text):
                return 1.0

        monkeypatch.setattr("benchmarks.async_vs_sync.slow_tool.asyncio.sleep", sleep)
        workflow = SlowTool(tool_s=4.0, spread=0.25)
        outcome = asyncio.run(workflow.run(OneTask(), {"planner": Agent(), "solver": Agent()}))
        question, seconds, plan = seen
        assert (question, plan, outcome.rewards) == ("1 + 0", "1", 1.0)
        assert 3.0 <= seconds <= 5.0
