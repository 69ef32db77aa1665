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
"""WorkflowDriver: failures that do not end, outages, and its own bugs end production with a cause (invariant 8)."""

import asyncio
from functools import partial

import pytest

from recipe.multi_policy_async.clock import now
from recipe.multi_policy_async.ingest.batch_source import ProducerDied
from recipe.multi_policy_async.simulator import virtual_time
from recipe.multi_policy_async.tests.fakes import driven_job
from recipe.multi_policy_async.tests.fakes.driven_job import Job, Scripted
from recipe.multi_policy_async.tests.fakes.gateway_control import http_error
from recipe.multi_policy_async.tests.fakes.workflow_records import PLANNER
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.workflow_driver import DriverError

play = partial(driven_job.play, run=virtual_time.run)  # these wait for seconds


def test_too_many_failures_in_a_row_end_the_driver_and_reach_the_trainers_with_the_cause(tmp_path):
    job = Job(tmp_path, Scripted({t: [RuntimeError("bug")] for t in range(50)}), tasks=50, max_failures_in_a_row=6)

    async def scenario():
        with pytest.raises(DriverError, match="6 workflows in a row failed.*RuntimeError: bug"):
            await job.driver.run()
        return await job.ingestor.take(PLANNER, 1, Version(0, 0), 1)

    answer = play(job, scenario)
    assert isinstance(answer, ProducerDied) and "bug" in answer.cause


def test_an_outage_starts_fewer_and_fewer_tasks_and_is_over_when_one_ends_well(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=40, n=1, max_attempts=1, retry_wait_s=0.02, max_concurrent=1)
    job.gateway.errors["create_workflow"] = [http_error(503)] * 12  # four workflows, each asks three times

    async def scenario():
        started = now()
        await job.driver.run()
        return await job.endings(), now() - started

    endings, seconds = play(job, scenario)
    assert endings == {"aborted": 4, "ok": 36}
    assert seconds > 0.02 * (2 + 4 + 8 + 16), "it waited"


def test_an_outage_that_does_not_end_ends_the_driver(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=40, n=1, max_attempts=1, max_outage_s=0.1)
    job.gateway.errors["create_workflow"] = [http_error(503)] * 1000

    async def scenario():
        with pytest.raises(DriverError, match="no workflow ended well for .* s; last: gateway, create_workflow.*503"):
            await job.driver.run()
        return await job.ingestor.take(PLANNER, 1, Version(0, 0), 1)

    assert isinstance(play(job, scenario), ProducerDied)


@pytest.mark.parametrize("aborted", [{1}, {1, 2}])
def test_time_in_which_training_left_no_room_is_no_outage(tmp_path, aborted):
    job = Job(tmp_path, Scripted(), tasks=4, n=1, max_concurrent=1, max_attempts=1, max_outage_s=0.2)
    admit, asked = job.ingestor.admit, []

    async def admit_after_a_long_step(epoch, task, members, timeout_s):
        asked.append(task)
        if asked.count(task) < 3:
            await asyncio.sleep(0.15)
            return False
        if len(set(asked)) - 1 in aborted:
            job.gateway.errors["create_workflow"] = [http_error(503)] * 3  # one workflow, it asks three times
        return await admit(epoch, task, members, timeout_s)

    job.ingestor.admit = admit_after_a_long_step

    async def scenario():
        await job.driver.run()
        return await job.endings()

    assert play(job, scenario) == {"aborted": len(aborted), "ok": 4 - len(aborted)}


def test_a_policy_whose_agent_is_not_called_any_more_ends_the_driver_by_name(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=40, idle_tasks_limit=6)
    job.gateway.silent_after = {"solver": 4}  # workflows

    async def scenario():
        with pytest.raises(DriverError, match="policy solver_model got no group.*queue.idle_tasks_limit"):
            await job.driver.run()
        return (await job.driver.stats())["tasks_started"], await job.ingestor.take(PLANNER, 1, Version(0, 0), 1)

    started, answer = play(job, scenario)
    assert 8 <= started < 40 and isinstance(answer, ProducerDied)


def test_a_bug_inside_the_driver_reaches_the_trainers(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=3)
    job.driver._tasks = None

    async def scenario():
        with pytest.raises(DriverError):
            await job.driver.run()
        return await job.ingestor.take(PLANNER, 1, Version(0, 0), 1)

    assert isinstance(play(job, scenario), ProducerDied)
