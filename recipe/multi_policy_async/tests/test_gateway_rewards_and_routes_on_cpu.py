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
"""Rewards onto trajectories, agents onto models, models onto bindings."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ..agent_model_route_table import AgentModelRouteTable, UnknownAgent
from ..gateway_binding_registry import GatewayBindingRegistry, ModelBinding, ModelState, ModelStatus
from ..rewards import mean_reward, mix_team_score, resolve_rewards
from ..trajectory import Trajectory, Version
from .fakes.gateway_world import binding

AGENTS = ("planner", "solver", "checker")


def row(agent_id: str, index: int = 0, model_id: str = "planner_model") -> Trajectory:
    return Trajectory(
        trajectory_id=f"e0-t0-s0-a0/{agent_id}/{index}",
        workflow_id="e0-t0-s0-a0",
        agent_id=agent_id,
        model_id=model_id,
        request_id=f"e0-t0-s0-a0.{agent_id}.{index}",
        turn=index,
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2], dtype=np.int32),
        response_mask=np.array([1], dtype=np.uint8),
        log_probs=np.array([-0.5], dtype=np.float32),
        versions=np.array([0], dtype=np.int32),
        incarnation=0,
        finish_reason="stop",
    )


def resolve(rewards, rows, **kwargs):
    resolved = resolve_rewards("e0-t0-s0-a0", rewards, rows, agents=AGENTS, trained_models=("planner_model",), **kwargs)
    return [r.reward for r in resolved]


def test_a_number_goes_to_every_trajectory():
    assert resolve(0.5, [row("planner"), row("solver"), row("solver", 1)]) == [0.5, 0.5, 0.5]


def test_a_trajectory_id_wins_over_its_agent():
    rows = [row("planner"), row("solver"), row("solver", 1)]
    assert resolve({"planner": 1, "solver": 0.25, rows[2].trajectory_id: -1.0}, rows) == [1.0, 0.25, -1.0]


@pytest.mark.parametrize(
    ("rewards", "share", "mixed"),
    [
        ({"planner": 0.0, "solver": 1.0}, 0.5, [0.25, 0.25, 0.75]),
        ({"planner": 0.0, "solver": 1.0}, 1.0, [0.5, 0.5, 0.5]),
        ({"planner": [0.0, 1.0], "solver": {0: 0.5}}, {"planner": 0.5}, [0.25, 0.75, 0.5]),
        ({"e0-t0-s0-a0/planner/0": 0.0, "planner": 0.25, "solver": 1.0}, {"planner": 0.8}, [1 / 3, 23 / 60, 1.0]),
        ([0.0, 1.0, 0.5], {"planner": 0.5}, [0.25, 0.75, 0.5]),  # rows say whose they are
        (1.0, 0.5, [1.0, 1.0, 1.0]),  # one reward for all is the team's already
    ],
)
def test_every_form_of_rewards_is_mixed_with_the_teams_score(rewards, share, mixed):
    """The score is the mean over agents of the mean over turns, here 0.5; over names where a row is named: 5/12."""
    rows = [row("planner"), row("planner", 1), row("solver")]
    resolved = resolve_rewards("w", rewards, rows, agents=AGENTS, trained_models=("planner_model",))
    found = mix_team_score(resolved, rewards, mean_reward(rewards), share)
    assert [each.reward for each in found] == pytest.approx(mixed)


def test_rows_without_a_reward_and_teams_without_a_score_have_nothing_to_mix():
    rows = (row("planner"), replace(row("solver"), reward=1.0))
    assert [each.reward for each in mix_team_score(rows, {"solver": 1.0}, 0.0, 0.5)] == [None, 0.5]
    assert mix_team_score(rows, None, None, 0.5) == rows


def test_an_agent_that_was_not_called_may_have_a_reward():
    assert resolve({"planner": 1.0, "checker": 0.0}, [row("planner")]) == [1.0]


def test_a_trained_row_without_a_reward_is_a_fault_and_a_frozen_one_is_not():
    with pytest.raises(ValueError, match=r"e0-t0-s0-a0.*planner/0.*no reward"):
        resolve({"solver": 1.0}, [row("planner"), row("solver")])
    assert resolve({"planner": 1.0}, [row("planner"), row("checker", model_id="frozen")]) == [1.0, None]


def test_a_list_holds_one_reward_per_trajectory_in_order():
    rows = [row("planner"), row("solver"), row("planner", 1)]
    assert resolve([0.1, 0.2, 0.3], rows) == [0.1, 0.2, 0.3]
    for wrong in ([0.1, 0.2], [], [0.1] * 4):
        with pytest.raises(ValueError, match=rf"e0-t0-s0-a0: {len(wrong)} rewards for the 3 trajectories"):
            resolve(wrong, rows)


def test_an_agents_list_holds_one_reward_per_turn_that_left_a_row():
    # The planner's turn 1 left no row: its answer never reached the client.
    rows = [row("planner", 0), row("solver"), row("planner", 2)]
    assert resolve({"planner": [0.1, 0.9], "solver": 1.0}, rows) == [0.1, 1.0, 0.9]
    with pytest.raises(ValueError, match=r"e0-t0-s0-a0: 3 rewards for the 2 turns of planner: \[0, 2\]"):
        resolve({"planner": [0.1, 0.2, 0.3], "solver": 1.0}, rows)


def test_an_agents_turns_may_be_named_by_number_in_python_and_in_json():
    rows = [row("planner", 0), row("planner", 2)]
    assert (
        resolve({"planner": {0: 0.1, 2: 0.9}}, rows) == resolve({"planner": {"2": 0.9, "0": 0.1}}, rows) == [0.1, 0.9]
    )
    with pytest.raises(ValueError, match=r"e0-t0-s0-a0: planner left no trajectory in turns \[1\]"):
        resolve({"planner": {0: 0.1, 1: 0.5, 2: 0.9}}, rows)
    with pytest.raises(ValueError, match=r"planner/2 \(turn 2\) .* has no reward"):
        resolve({"planner": {0: 0.1}}, rows)
    with pytest.raises(ValueError, match="e0-t0-s0-a0: planner: 'last' is no turn number"):
        resolve({"planner": {"last": 0.1}}, rows)


def test_all_choices_of_a_turn_share_its_reward_unless_one_is_named():
    choices = [row("planner", 0), replace(row("planner", 0), trajectory_id="e0-t0-s0-a0/planner/1")]
    assert resolve({"planner": [0.5]}, choices) == [0.5, 0.5]
    assert resolve({"planner": [0.5], "e0-t0-s0-a0/planner/1": 0.0}, choices) == [0.5, 0.0]


def test_one_trajectory_takes_one_number():
    with pytest.raises(ValueError, match="e0-t0-s0-a0: .*planner/0 is one trajectory"):
        resolve({"e0-t0-s0-a0/planner/0": [1.0]}, [row("planner")])


def test_a_failed_workflow_needs_no_reward():
    assert resolve(None, [row("planner")], required=False) == [None]


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, pytest.param(10**400, id="larger than floats"), -math.inf, None, "1", {"x": 1}]
)
@pytest.mark.parametrize("form", [lambda r: r, lambda r: [r], lambda r: {"planner": r}, lambda r: {"planner": [r]}])
def test_a_reward_that_is_no_finite_number_names_the_workflow_in_every_form(bad, form):
    with pytest.raises(ValueError, match="e0-t0-s0-a0"):
        resolve(form(bad), [row("planner")])


def test_no_reward_at_all_names_the_workflow():
    with pytest.raises(ValueError, match="e0-t0-s0-a0"):
        resolve(None, [row("planner")])


@pytest.mark.parametrize("name", ["plannner", "e0-t0-s0-a0/planner/7", "e0-t1-s0-a0/planner/0"])
def test_an_unknown_name_is_told_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"e0-t0-s0-a0.*unknown.*checker"):
        resolve({"planner": 1.0, name: 1.0}, [row("planner")])


def test_two_agents_may_share_a_model_and_an_unknown_agent_is_named_with_the_known_ones():
    table = AgentModelRouteTable({"planner": "a", "solver": "b", "checker": "b"}, ["a", "b", "c"])
    assert (table.model_id("solver"), table.model_id("checker")) == ("b", "b")
    assert table.models == {"a", "b"}
    with pytest.raises(UnknownAgent, match=r"'reviewer'.*checker.*planner.*solver"):
        table.model_id("reviewer")


def test_all_faults_of_a_mapping_are_listed_at_once():
    with pytest.raises(ValueError) as caught:
        AgentModelRouteTable({"a/b": "planner_model", "solver": "solver_mdoel"}, ["planner_model"])
    assert "a/b" in str(caught.value) and "solver_mdoel" in str(caught.value)
    with pytest.raises(ValueError, match="empty"):
        AgentModelRouteTable({}, ["planner_model"])


def bound(model_id: str = "a", incarnation: int = 0) -> ModelBinding:
    return binding(model_id, Path("/nowhere"), "", incarnation=incarnation)


def test_a_models_status_and_binding_leave_the_other_models_alone():  # invariant 7
    registry = GatewayBindingRegistry(["a", "b"])
    registry.bind(bound("a"))
    registry.set_status("a", ModelStatus(ModelState.SYNCING, Version(0, 3)))
    assert registry.status("a").version == Version(0, 3)
    assert registry.status("b").state == ModelState.STARTING
    assert registry.binding("b") is None
    with pytest.raises(ValueError, match="unknown model"):
        registry.bind(bound("c"))


def test_an_older_incarnation_cannot_bind_after_a_newer_one():
    registry = GatewayBindingRegistry(["a"])
    registry.bind(bound(incarnation=2))
    registry.bind(bound(incarnation=2))
    with pytest.raises(ValueError, match="incarnation 1"):
        registry.bind(bound(incarnation=1))
