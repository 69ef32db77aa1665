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
"""Rewards on their way from a workflow to its agents: every form, mixed with the team's score."""

import pytest

from recipe.multi_policy_async.tests.fakes.driven_job import (
    Job,
    Scripted,
    play,
    workflow_spec,
)
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
)
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.workflows.base import Outcome, as_outcome, mix_team_score


def test_agents_share_the_teams_score_as_configured(tmp_path):
    job = Job(tmp_path, Scripted({0: [{"planner": 0.0, "solver": 1.0}]}), tasks=1, team_share={"planner": 0.5})

    async def scenario():
        await job.driver.run()
        batches = [await job.ingestor.take(m, 1, Version(0, 0), 1) for m in (PLANNER, SOLVER)]
        return [batch.groups[0].trajectories[0].reward for batch in batches], (await job.driver.stats())["score_mean"]

    assert play(job, scenario) == ([0.25, 1.0], 0.5)


@pytest.mark.parametrize(
    ("rewards", "share", "mixed"),
    [
        ({"planner": 0.0, "solver": 1.0}, 0.5, {"planner": 0.25, "solver": 0.75}),
        ({"planner": [0.0, 1.0], "solver": {3: 0.5}}, {"planner": 0.5}, {"planner": [0.25, 0.75], "solver": {3: 0.5}}),
        (
            {"e0-t0/planner/0": 0.0, "e0-t0:solver:1": 1.0},
            {"planner": 1.0},
            {"e0-t0/planner/0": 0.5, "e0-t0:solver:1": 1},
        ),
        ([0.0, 1.0], 0.5, [0.25, 0.75]),
        (1.0, 0.5, 1.0),  # one reward for all is the team's already
    ],
)
def test_every_form_of_rewards_is_mixed_with_the_teams_score(rewards, share, mixed):
    """The score is 0.5: the mean over agents of the mean over turns."""
    assert mix_team_score(as_outcome(rewards), share).rewards == mixed


def test_shares_by_agent_need_rewards_that_say_whose_they_are():
    with pytest.raises(ValueError, match="team_share differs by agent"):
        mix_team_score(as_outcome([0.0, 1.0]), {"planner": 0.5})


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
