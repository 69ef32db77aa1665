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
"""Rewards on their way from a workflow to the gateway."""

import pytest

from recipe.multi_policy_async.tests.fakes.driven_job import (
    Job,
    Scripted,
    play,
    workflow_spec,
)
from recipe.multi_policy_async.tests.fakes.workflow_records import SOLVER
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.workflows.base import Outcome


def test_a_workflow_may_leave_the_rewards_to_its_agents(tmp_path):
    job = Job(tmp_path, Scripted({0: [Outcome(None)]}), tasks=1, n=2)
    job.gateway.posted = {"planner": 0.25, "solver": 0.75}

    async def scenario():
        await job.driver.run()
        batch = await job.ingestor.take(SOLVER, 1, Version(0, 0), 1)
        report = await job.driver.evaluate()
        return [t.reward for t in batch.groups[0].trajectories], (await job.driver.stats())["score_mean"], report.score

    # Four evaluation tasks, of which only the first leaves its reward to the agents: (0.5 + 3 * 1) / 4.
    assert play(job, scenario) == ([0.75, 0.75], 0.5, 0.875)


@pytest.mark.parametrize("share", [1.5, -0.1, {"planner": 2.0}])
def test_a_share_outside_zero_and_one_is_refused(share):
    with pytest.raises(ValueError, match="team_share must lie between 0 and 1"):
        workflow_spec(team_share=share)
