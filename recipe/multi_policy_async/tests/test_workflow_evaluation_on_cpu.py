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
"""Evaluations: one score of the whole team beside production, of which the ledger sees nothing."""

import asyncio

import pytest

from recipe.multi_policy_async.tests.fakes.driven_job import (
    Job,
    Scripted,
    Shifted,
    eventually,
    play,
    validation_spec,
)
from recipe.multi_policy_async.tests.fakes.gateway_control import http_error
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    workflow_stats,
)
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.workflows.base import Outcome


def test_an_evaluation_is_one_score_of_the_team_in_which_failures_count_and_the_ledger_sees_nothing(tmp_path):
    script = {0: [{"planner": 1.0, "solver": 0.5}], 1: [RuntimeError("no plan")], 2: [1.0], 3: [0.25]}
    job = Job(tmp_path, Scripted(script), tasks=1)

    async def scenario():
        report = await job.driver.evaluate()
        return report, await job.ingestor.stats(), workflow_stats(job.ingestor)

    report, stats, workflows = play(job, scenario)
    assert (report.workflows, report.failed, report.score) == (4, 1, (0.75 + 0 + 1 + 0.25) / 4)
    assert report.rewards == {"planner": (1 + 0 + 1 + 0.25) / 4, "solver": (0.5 + 0 + 1 + 0.25) / 4}
    assert report.last_error == "RuntimeError: no plan"
    assert (report.first[PLANNER], report.last[PLANNER]) == (Version(0, 2), Version(1, 3))
    assert stats[PLANNER]["accepted"] == 0 and workflows["open_tasks"] == 0


def test_an_evaluation_goes_on_beside_production_with_slots_of_its_own(tmp_path):
    """All of training's slots are held by workflows that do not end before the evaluation has."""
    evaluated = asyncio.Event()

    async def wait():
        await evaluated.wait()
        return 1.0

    workflow = Scripted({task: [wait] for task in range(10, 14)})
    job = Job(tmp_path, workflow, n=1, max_concurrent=4, validation=validation_spec(max_concurrent=2))
    job.driver._tasks = Shifted(10)

    async def scenario():
        running = asyncio.create_task(job.driver.run())
        await eventually(lambda: workflow.running == 4)
        report, most = await job.driver.evaluate(), workflow.most_running
        evaluated.set()
        await running
        return report.workflows, most, await job.endings()

    assert play(job, scenario) == (4, 4 + 2, {"ok": 4})


def test_a_gateway_that_is_away_makes_evaluated_workflows_fail_and_nothing_else(tmp_path):
    job = Job(tmp_path, Scripted(), validation=validation_spec(max_concurrent=1))
    job.gateway.errors["create_workflow"] = [http_error(503)] * 3  # of the first one, which asks three times
    job.gateway.errors["finalize"] = [http_error(503)] * 3

    report = play(job, job.driver.evaluate)
    assert (report.workflows, report.failed, report.score) == (4, 2, 0.5)
    assert len(job.gateway.aborted) == 2, "their sessions are released"


def test_what_has_not_ended_when_an_evaluation_runs_out_of_time_has_failed(tmp_path):
    script = {2: [lambda: asyncio.sleep(60)]}
    job = Job(tmp_path, Scripted(script), validation=validation_spec(timeout_s=0.2))

    report = play(job, job.driver.evaluate)
    assert (report.workflows, report.failed, report.score) == (4, 1, 0.75)
    assert report.last_error == "did not end within validation.timeout_s=0.2"
    assert job.gateway.aborted == [job.gateway.created[2]]


def test_every_task_is_played_as_often_as_configured(tmp_path):
    job = Job(tmp_path, Scripted({0: [0.0, 1.0, 1.0]}), validation=validation_spec(n=3))
    report = play(job, job.driver.evaluate)
    assert (report.workflows, report.score) == (12, 11 / 12)
    assert len(set(job.gateway.created)) == 12


def test_a_stopped_driver_gives_up_an_evaluation(tmp_path):
    workflow = Scripted({task: [lambda: asyncio.sleep(60)] for task in range(4)})
    job = Job(tmp_path, workflow)

    async def scenario():
        evaluating = asyncio.create_task(job.driver.evaluate())
        await eventually(lambda: workflow.running == 4)
        await job.driver.stop()
        await asyncio.wait({evaluating})
        return workflow.running, len(job.gateway.aborted)

    assert play(job, scenario) == (0, 4)


def test_without_evaluation_tasks_that_is_said(tmp_path):
    job = Job(tmp_path, Scripted())
    job.driver._evaluator = None
    with pytest.raises(ValueError, match="data.val_files names no file"):
        play(job, job.driver.evaluate)


def test_an_evaluation_to_which_nobody_posts_a_reward_failed(tmp_path):
    job = Job(tmp_path, Scripted({index: [Outcome(None)] for index in range(4)}))
    report = play(job, job.driver.evaluate)
    assert (report.failed, report.last_error) == (4, "no reward was returned or posted")
