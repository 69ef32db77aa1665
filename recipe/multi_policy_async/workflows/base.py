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
"""What a user writes (a ``Workflow``) and what it is given (a ``Task`` and ``Agents``)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Task(Mapping[str, Any]):
    """A dataset row in verl's RLHF columns, by key, with short names for the usual ones.

    Args:
        index: its place in the dataset; part of every workflow id.
        row: ``prompt`` (messages), ``data_source``, ``ability``, ``reward_model``, ``extra_info`` and any others.
    """

    def __init__(self, index: int, row: Mapping[str, Any]):
        self.index = index
        self.row = dict(row)

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)

    def __repr__(self) -> str:
        return f"Task({self.index}, {self.row!r})"

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The row's messages."""
        return list(self.row["prompt"])

    @property
    def question(self) -> str:
        """The last user message.

        Raises:
            ValueError: the prompt has no user message.
        """
        for message in reversed(self.prompt):
            if message["role"] == "user":
                return message["content"]
        raise ValueError(f"task {self.index}: its prompt has no user message")

    @property
    def ground_truth(self) -> Any:
        """``reward_model.ground_truth``, or ``None``."""
        return (self.row.get("reward_model") or {}).get("ground_truth")


@dataclass(frozen=True)
class Outcome:
    """A workflow's result, when a number or a mapping does not say it all.

    ``rewards``: one number for all agents, or numbers by agent id or trajectory id. ``score``: the team's result for
    the metrics, by default the reward or the mean of the rewards. ``info``: goes to the episode dump.
    """

    rewards: float | Mapping[str, float]
    score: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Workflow(Protocol):
    """One episode of several agents on a task."""

    async def run(self, task: Task, agents: Any) -> float | Mapping[str, float] | Outcome:
        """Play an episode and judge it.

        A plain (not async) ``run`` is started in a thread of its own. What it raises makes the episode a ``failed``
        member of its group.

        Args:
            task: the dataset row.
            agents: ``agents["planner"]`` is an ``Agent`` (agents.py).

        Returns:
            The reward: one number for all agents, numbers by agent id, or an ``Outcome``.
        """
        ...


def mix_team_score(outcome: Outcome, team_share: float | Mapping[str, float]) -> Outcome:
    """Give each agent ``share * score + (1 - share) * its own reward``; one reward for all agents stays as it is.

    Args:
        outcome: as ``as_outcome`` made it.
        team_share: one share for all agents, or shares by agent id (others: 0).
    """
    if not isinstance(outcome.rewards, Mapping) or outcome.score is None:
        return outcome
    shares = team_share if isinstance(team_share, Mapping) else dict.fromkeys(outcome.rewards, team_share)
    rewards = {
        name: shares.get(name, 0.0) * outcome.score + (1 - shares.get(name, 0.0)) * reward
        for name, reward in outcome.rewards.items()
    }
    return Outcome(rewards, outcome.score, outcome.info)


def as_outcome(result: Any) -> Outcome:
    """What ``run`` returned, in one form.

    Raises:
        ValueError: it is no number, mapping by name or ``Outcome``, or a reward or the score is not finite.
    """
    outcome = result if isinstance(result, Outcome) else Outcome(result)
    rewards = outcome.rewards
    try:
        if isinstance(rewards, Mapping):
            if not all(isinstance(name, str) for name in rewards):
                raise TypeError("agents and trajectories are named by texts")
            rewards = {name: _number(value) for name, value in rewards.items()}
            score = sum(rewards.values()) / len(rewards) if outcome.score is None else _number(outcome.score)
        else:
            rewards = _number(rewards)
            score = rewards if outcome.score is None else _number(outcome.score)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"a workflow must return a number, numbers by agent, or an Outcome, not {result!r}: {error}"
        ) from error
    numbers = {**rewards, "score": score} if isinstance(rewards, Mapping) else {"reward": rewards, "score": score}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}, not a finite number")
    return Outcome(rewards, score, outcome.info)


def _number(value: Any) -> float:
    if not hasattr(value, "__float__"):  # float() would also read a text
        raise TypeError(f"{type(value).__name__} is no number")
    return float(value)
