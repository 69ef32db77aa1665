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
"""Rewards by turn, and rewards that agents post themselves, over real HTTP."""

import asyncio
import json

import httpx
import pytest

from ..gateway.client import ControlError
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import gateway_world

W = "e0-t0-s0-a0"


def play(folder, texts, act, purpose="train", **spec):
    """Two turns of the planner and one of the solver; then ``act(world, endpoints, post)``."""

    async def run():
        engines = {name: FakeEngine(texts.says("fine")) for name in ("planner_model", "solver_model")}
        async with gateway_world(folder, engines, **spec) as world, httpx.AsyncClient(verify=False) as http:
            endpoints = await world.open(W, purpose=purpose)
            planner, solver = (world.client(endpoints[agent]) for agent in ("planner", "solver"))
            history = [{"role": "user", "content": "one"}]
            first = await planner.chat.completions.create(model="m", messages=history)
            answer = {"role": "assistant", "content": first.choices[0].message.content}
            history += [answer, {"role": "user", "content": "two"}]
            await planner.chat.completions.create(model="m", messages=history)
            await solver.chat.completions.create(model="m", messages=history[:1])

            async def post(agent, content):
                # What an agent without our Python packages does: it knows its base URL, nothing else.
                url = f"{endpoints[agent].openai_base_url}/rewards"
                return await http.post(url, content=content, headers={"content-type": "application/json"})

            await act(world, endpoints, post)
            return {(row.agent_id, row.turn): row.reward for row in world.sink.rows}, world

    return asyncio.run(run())


def test_a_black_box_agent_posts_its_own_reward(folder, texts):
    async def act(world, endpoints, post):
        assert (await post("planner", '{"reward": [0.1, 0.9]}')).status_code == 200
        assert (await post("solver", '{"reward": 0.5}')).status_code == 200
        final = await world.control.finalize(W)
        assert final["score"] == 0.5  # mean over agents of the mean over turns
        assert (await post("solver", '{"reward": 1.0}')).status_code == 409

    rewards, world = play(folder, texts, act)
    assert rewards == {("planner", 0): 0.1, ("planner", 1): 0.9, ("solver", 0): 0.5}
    assert world.sink.records[0].score == 0.5


async def _posted_by_each(world, endpoints, post):
    await post("planner", '{"reward": [0.0, 0.5]}')
    await post("solver", '{"reward": 0.75}')
    return await world.control.finalize(W)


async def _posted_for_all(world, endpoints, post):
    await post("solver", '{"rewards": {"planner": [0.0, 0.5], "solver": 0.75}}')
    return await world.control.finalize(W)


async def _reported_by_the_control_api(world, endpoints, post):
    await world.control.report_rewards(W, {"planner": [0.0, 0.5], "solver": 0.75})
    return await world.control.finalize(W)


async def _brought_by_finalize(world, endpoints, post):
    return await world.control.finalize(W, rewards={"planner": [0.0, 0.5], "solver": 0.75})


async def _brought_in_a_list(world, endpoints, post):
    return await world.control.finalize(W, rewards=[0.0, 0.5, 0.75], score=0.5)


ORIGINS = [_posted_by_each, _posted_for_all, _reported_by_the_control_api, _brought_by_finalize, _brought_in_a_list]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize(
    ("share", "mixed"), [(0.5, [0.25, 0.5, 0.625]), ({"planner": 0.5}, [0.25, 0.5, 0.75]), (0.0, [0.0, 0.5, 0.75])]
)
def test_rewards_are_mixed_with_the_teams_score_wherever_they_come_from(folder, texts, origin, share, mixed):
    """The score is 0.5: the mean over agents of the mean over turns. It is the team's before anything is mixed."""

    async def act(world, endpoints, post):
        answer = await origin(world, endpoints, post)
        assert answer["score"] == 0.5
        assert [row["reward"] for row in answer["trajectories"]] == mixed

    rewards, world = play(folder, texts, act, team_share=share)
    assert list(rewards.values()) == mixed and world.sink.records[0].score == 0.5


@pytest.mark.parametrize("origin", [_posted_by_each, _brought_by_finalize])
def test_a_reward_is_mixed_once_however_often_finalize_is_tried(folder, texts, origin):
    """The ingestor is away at first, then a finalize comes whose rewards fit nothing, and one whose answer was lost."""

    async def act(world, endpoints, post):
        world.sink.failures = 2
        for _ in range(2):
            with pytest.raises(ControlError) as away:
                await origin(world, endpoints, post)
            assert away.value.status == 503
        with pytest.raises(ControlError) as refused:
            await world.control.finalize(W, rewards=[1.0])
        assert refused.value.status == 400
        first = await origin(world, endpoints, post)
        assert await origin(world, endpoints, post) == first

    rewards, world = play(folder, texts, act, team_share=0.5)
    assert list(rewards.values()) == [0.25, 0.5, 0.625] and len(world.sink.records) == 1


def test_rewards_of_a_failed_workflow_are_mixed_too(folder, texts):
    """``on_failed: keep`` trains them; the workflow has no score for the metrics all the same."""

    async def act(world, endpoints, post):
        await post("solver", '{"rewards": {"planner": [0.0, 0.5], "solver": 0.75}}')
        assert (await world.control.finalize(W, status="failed"))["score"] is None

    assert list(play(folder, texts, act, team_share=0.5)[0].values()) == [0.25, 0.5, 0.625]


def test_an_evaluation_shows_the_rewards_that_agents_would_be_trained_with(folder, texts):
    async def act(world, endpoints, post):
        answer = await _posted_for_all(world, endpoints, post)
        assert answer["score"] == 0.5
        assert [row["reward"] for row in answer["trajectories"]] == [0.25, 0.5, 0.625]

    assert play(folder, texts, act, purpose="eval", team_share=0.5)[0] == {}, "it leaves no record"


def test_whoever_judges_the_team_may_post_for_all_agents(folder, texts):
    async def act(world, endpoints, post):
        await post("solver", '{"rewards": {"planner": {"0": 0.25, "1": 0.75}, "solver": 1}}')
        await world.control.finalize(W)

    rewards, _ = play(folder, texts, act)
    assert rewards == {("planner", 0): 0.25, ("planner", 1): 0.75, ("solver", 0): 1.0}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"reward": null}', "is None, not a finite number"),
        ('{"reward": "high"}', "is 'high', not a finite number"),
        ('{"rewards": {"slover": 1}}', "unknown agents ['slover']"),
        ('{"reward": {"first": 1}}', "'first' is no turn number"),
        ('{"reward": 1e300}', "is 1e+300, not a finite number"),  # not to float32, in which trainers compute
    ],
)
def test_a_posted_reward_that_cannot_be_used_is_told_at_once_with_the_workflow(folder, texts, body, says):
    async def act(world, endpoints, post):
        answer = await post("planner", body)
        assert answer.status_code == 400
        assert W in answer.text and says in answer.json()["error"]["message"]
        await world.control.finalize(W, rewards=1.0)

    play(folder, texts, act)


def test_a_score_that_is_not_finite_is_refused_and_can_be_given_again(folder, texts):
    async def act(world, endpoints, post):
        with pytest.raises(ControlError, match=f"{W}: score is 1e.300, not a finite number") as refusal:
            await world.control.finalize(W, rewards=1.0, score=1e300)
        assert refusal.value.status == 400
        await world.control.finalize(W, rewards=1.0, score=0.5)

    play(folder, texts, act)


@pytest.mark.parametrize("body", ['{"reward": NaN}', '{"reward": 1, "rewards": 1}', "{}", '{"score": 1}', "[1]"])
def test_other_bodies_are_refused(folder, texts, body):
    async def act(world, endpoints, post):
        assert (await post("planner", body)).status_code == 400
        await world.control.finalize(W, rewards=1.0)

    play(folder, texts, act)


def test_rewards_by_turn_give_one_row_per_turn_also_where_conversations_are_merged(folder, texts):
    """GRPO sums rewards over a row and has one group per row, so each turn needs a row of its own."""

    async def by_agent(world, endpoints, post):
        await world.control.finalize(W, rewards={"planner": 0.5, "solver": 1.0})

    async def by_turn(world, endpoints, post):
        await world.control.finalize(W, rewards={"planner": [0.1, 0.9], "solver": 1.0})

    assert play(folder, texts, by_agent, rows="merged")[0] == {("planner", 0): 0.5, ("solver", 0): 1.0}
    rewards, world = play(folder, texts, by_turn, rows="merged")
    assert rewards == {("planner", 0): 0.1, ("planner", 1): 0.9, ("solver", 0): 1.0}
    assert [row.turn for row in world.sink.rows if row.agent_id == "planner"] == [0, 1]


@pytest.mark.parametrize(
    "rewards",
    [0.5, [0.5, 0.5, 0.5], {"planner": 0.5, "solver": 0.5}, {"planner": (0.5, 0.5), "solver": {0: 0.5}}]
    + [{f"{W}/planner/0": 0.5, f"{W}:planner:1": 0.5, "solver": 0.5}],
)
def test_every_form_reaches_the_rows_through_the_control_client(folder, texts, rewards):
    async def act(world, endpoints, post):
        json.dumps(await world.control.finalize(W, rewards=rewards))

    assert play(folder, texts, act)[0] == {("planner", 0): 0.5, ("planner", 1): 0.5, ("solver", 0): 0.5}
