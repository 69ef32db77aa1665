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
"""The forms in which a workflow's rewards may be given, and their way onto its trajectories.

0.5                               every trajectory
[0.1, 0.9]                        one per trajectory, in the order in which they began
{"planner": 0.2, "solver": 1.0}   by agent; also by trajectory id or request id, which win over the agent
{"planner": [0.1, 0.9]}           by agent and turn: one per turn that left a row, in order
{"planner": {0: 0.1, 1: 0.9}}     the same by turn number (the last part of a request id; in JSON a text)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .trajectory import Trajectory

TurnRewards = Sequence[float] | Mapping[int, float]
Rewards = float | Sequence[float] | Mapping[str, float | TurnRewards]

TeamShare = float | Mapping[str, float]
"""Share of the team's score in an agent's reward: one for all agents, or by agent id, where others have none."""

Place = tuple[str | int, ...]
"""Where a number stands in rewards: ``()``, ``(index,)``, ``(name,)`` or ``(name, turn or index)``."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Trainers compute with float32: what is larger is infinite to them."""


def map_rewards(rewards: Any, change: Callable[[Place, Any], Any]) -> Any:
    """The same rewards with ``change(place, value)`` for each value, in lists and dicts; turns become integers.

    Raises:
        ValueError: a name is no text, or a turn no number.
    """
    if not isinstance(rewards, Mapping):
        return _map_turns((), rewards, change)
    for name in rewards:
        if not isinstance(name, str):
            raise ValueError(f"agents and trajectories are named by texts, not {name!r}")
    return {name: _map_turns((name,), value, change) for name, value in rewards.items()}


def _map_turns(place: Place, value: Any, change: Callable[[Place, Any], Any]) -> Any:
    if isinstance(value, Mapping):
        turns = [(_turn(place, turn), reward) for turn, reward in value.items()]
        return {turn: change((*place, turn), reward) for turn, reward in turns}
    if is_list(value):
        return [change((*place, index), reward) for index, reward in enumerate(value)]
    return change(place, value)


def is_list(value: Any) -> bool:
    """Whether a value stands for several numbers in order; arrays of one dimension do."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1


def _turn(place: Place, turn: Any) -> int:
    if isinstance(turn, int) and not isinstance(turn, bool) and turn >= 0:
        return turn
    if isinstance(turn, str) and turn.isascii() and turn.isdigit():
        return int(turn)
    raise ValueError(f"{describe(place)}: {turn!r} is no turn number")


def describe(place: Place) -> str:
    """A place as it would be written: ``planner[1]``."""
    name = place[0] if place and isinstance(place[0], str) else "reward"
    return name + "".join(f"[{part}]" for part in place if not isinstance(part, str))


def plain(rewards: Any) -> Any:
    """The same rewards in dicts, lists and numbers, as JSON takes them."""
    return map_rewards(rewards, lambda _, value: value)


def mean_reward(rewards: Rewards) -> float | None:
    """The mean over agents of the mean over turns; ``None`` where there is no number."""
    if isinstance(rewards, Mapping):
        means = [mean_reward(value) for value in rewards.values()]
        rewards = [mean for mean in means if mean is not None]
    if is_list(rewards):
        return sum(rewards) / len(rewards) if len(rewards) else None
    return float(rewards)


def by_turn(rewards: Any) -> frozenset[str]:
    """Agents whose rewards differ by turn. Their rows must hold one turn each: GRPO knows one reward per row."""
    if not isinstance(rewards, Mapping):
        return frozenset()
    return frozenset(name for name, value in rewards.items() if is_list(value) or isinstance(value, Mapping))


def check_rewards(workflow_id: str, rewards: Any, agents: Collection[str]) -> Any:
    """Check what can be checked before the workflow has ended.

    Args:
        workflow_id: named in faults.
        rewards: in any form.
        agents: the agents of the job; ids of trajectories and requests hold a ``/`` or ``:`` and are checked later.

    Returns:
        The rewards in dicts, lists and floats.

    Raises:
        ValueError: naming the workflow, for a value that is no finite number, or an unknown agent.
    """
    if isinstance(rewards, Mapping):
        unknown = sorted(str(name) for name in rewards if name not in agents and not _is_row_id(name))
        if unknown:
            raise ValueError(
                f"workflow {workflow_id}: rewards name unknown agents {unknown}; known are {sorted(agents)}"
            )
    try:
        return map_rewards(rewards, _finite)
    except ValueError as fault:
        raise ValueError(f"workflow {workflow_id}: {fault}") from None


def _is_row_id(name: Any) -> bool:
    return isinstance(name, str) and ("/" in name or ":" in name)


def resolve_rewards(
    workflow_id: str,
    rewards: Rewards | None,
    trajectories: Sequence[Trajectory],
    *,
    agents: Collection[str],
    trained_models: Collection[str],
    required: bool = True,
) -> tuple[Trajectory, ...]:
    """Give every trajectory its reward.

    Args:
        workflow_id: named in faults.
        rewards: in any form. A known agent without trajectories may be named by a number: it was not called.
        trajectories: rows in the order in which they began; of agents in ``by_turn(rewards)`` with one turn each.
        agents: the agents of the job; other names are faults.
        trained_models: models whose rows enter training, and therefore need a reward.
        required: False for failed workflows, whose rows may stay without a reward.

    Returns:
        The trajectories in their order, with ``reward`` set.

    Raises:
        ValueError: naming the workflow, for a reward that is missing, not a finite number, or addressed to an unknown
            agent, trajectory or turn.
    """
    where = f"workflow {workflow_id}"
    if rewards is not None:
        rewards = check_rewards(workflow_id, rewards, agents)
    if isinstance(rewards, list) and len(rewards) != len(trajectories):
        ids = [t.trajectory_id for t in trajectories]
        raise ValueError(f"{where}: {len(rewards)} rewards for the {len(ids)} trajectories {ids}")
    if isinstance(rewards, dict):
        _check_names(where, rewards, trajectories, agents)
    resolved = []
    for index, trajectory in enumerate(trajectories):
        reward = rewards[index] if isinstance(rewards, list) else rewards
        if isinstance(rewards, dict):
            names = (trajectory.trajectory_id, trajectory.request_id, trajectory.agent_id)
            reward = next((rewards[name] for name in names if name in rewards), None)
            if isinstance(reward, list):
                reward = reward[_turns(trajectories, trajectory.agent_id).index(trajectory.turn)]
            elif isinstance(reward, dict):
                reward = reward.get(trajectory.turn)
        if reward is None and required and trajectory.model_id in trained_models:
            raise ValueError(
                f"{where}: trajectory {trajectory.trajectory_id} (turn {trajectory.turn}) of trained model "
                f"{trajectory.model_id} has no reward"
            )
        resolved.append(replace(trajectory, reward=reward))
    return tuple(resolved)


def mix_team_score(
    trajectories: Sequence[Trajectory], rewards: Rewards | None, score: float | None, team_share: TeamShare
) -> tuple[Trajectory, ...]:
    """Give each row ``share * score + (1 - share) * its own reward``; one number for all rows is the team's already.

    Args:
        trajectories: as ``resolve_rewards`` made them; rows without a reward stay so.
        rewards: what they were made of.
        score: the team's; ``None``: there is none to mix in.
        team_share: of the score.
    """
    if score is None or isinstance(rewards, int | float):
        return tuple(trajectories)

    def mixed(row: Trajectory) -> Trajectory:
        share = team_share.get(row.agent_id, 0.0) if isinstance(team_share, Mapping) else team_share
        return row if row.reward is None else replace(row, reward=share * score + (1 - share) * row.reward)

    return tuple(mixed(row) for row in trajectories)


def _check_names(
    where: str, rewards: dict[str, Any], trajectories: Sequence[Trajectory], agents: Collection[str]
) -> None:
    rows = {name for t in trajectories for name in (t.trajectory_id, t.request_id)}
    unknown = sorted(name for name in rewards if name not in agents and name not in rows)
    if unknown:
        raise ValueError(
            f"{where}: rewards name unknown trajectories {unknown}; known agents are {sorted(agents)}, trajectories "
            f"{[t.trajectory_id for t in trajectories]}"
        )
    for name in by_turn(rewards):
        if name not in agents:
            raise ValueError(f"{where}: {name} is one trajectory and takes one number, not {rewards[name]}")
        turns, given = _turns(trajectories, name), rewards[name]
        if isinstance(given, list) and len(given) != len(turns):
            raise ValueError(f"{where}: {len(given)} rewards for the {len(turns)} turns of {name}: {turns}")
        if isinstance(given, dict) and (extra := sorted(set(given) - set(turns))):
            raise ValueError(f"{where}: {name} left no trajectory in turns {extra}; it did in {turns}")


def _turns(trajectories: Sequence[Trajectory], agent_id: str) -> list[int]:
    return sorted({t.turn for t in trajectories if t.agent_id == agent_id})


def is_finite(value: float) -> bool:
    """Whether a number is finite to a trainer too; also for integers that no float can hold."""
    return abs(value) <= LARGEST_REWARD  # not so for NaN


def _finite(place: Place, value: object) -> float:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float) or not is_finite(value):
        raise ValueError(f"{describe(place)} is {value!r}, not a finite number")
    return float(value)
