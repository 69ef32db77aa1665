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

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..rewards import Place, Rewards, describe, is_finite, map_rewards, mean_reward


class Task(Mapping[str, Any]):
    """A dataset row in verl's RLHF columns, by key, with short names for the usual ones.

    Args:
        index: its place in the dataset; part of every workflow id.
        row: ``prompt`` (messages), ``data_source``, ``ability``, ``reward_model``, ``extra_info`` and any others.
        scorer: judges an answer to it; ``None``: the verifier of its ``data_source``.
    """

    def __init__(self, index: int, row: Mapping[str, Any], scorer: "Scorer | None" = None):
        self.index = index
        self.row = dict(row)
        self._scorer = scorer

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

    async def score(self, text: str) -> float:
        """Judge an agent's final answer, by ``reward.custom_reward_function`` if the job has one.

        Raises:
            Exception: what the function or the verifier raises.
        """
        if self._scorer is None:
            from .scoring import score_in_thread  # here: it imports this module

            return await score_in_thread(self, text)
        return await self._scorer(self, text)


Scorer = Callable[[Task, str], Awaitable[float]]
"""Judges an answer to a task."""


@dataclass(frozen=True)
class Outcome:
    """A workflow's result, when rewards alone do not say it all.

    ``rewards``: in any form of ``rewards.py``; ``None``: the agents post them over HTTP. ``score``: the team's result,
    by default the mean of the rewards over agents; ``workflow.team_share`` mixes it into the agents' rewards. ``info``:
    goes to the episode dump.
    """

    rewards: Rewards | None
    score: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Workflow(Protocol):
    """One episode of several agents on a task."""

    async def run(self, task: Task, agents: Any) -> Rewards | Outcome:
        """Play an episode and judge it.

        A plain (not async) ``run`` is started in a thread of its own. What it raises makes the episode a ``failed``
        member of its group.

        Args:
            task: the dataset row.
            agents: ``agents["planner"]`` is an ``Agent`` (agents.py).

        Returns:
            The reward: one number for all agents, numbers by agent or by agent and turn (``rewards.py``), or an
            ``Outcome``.
        """
        ...


def as_outcome(result: Any) -> Outcome:
    """What ``run`` returned, in one form: rewards in dicts, lists and floats, and a score if one is known.

    Raises:
        ValueError: it is not in a form of ``rewards.py`` and no ``Outcome``, or a reward or the score is not finite.
    """
    outcome = result if isinstance(result, Outcome) else Outcome(result)
    try:
        if outcome.rewards is None and outcome is result:
            return Outcome(None, None if outcome.score is None else _number((), outcome.score), outcome.info)
        rewards = map_rewards(outcome.rewards, _number)
        score = mean_reward(rewards) if outcome.score is None else _number((), outcome.score)
        if score is None:
            raise TypeError("there is no reward in it")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"a workflow must return a number, numbers by agent, or an Outcome, not {result!r}: {error}"
        ) from error
    map_rewards(rewards, _check_finite)
    if not is_finite(score):
        raise ValueError(f"score is {score}, not a finite number")
    return Outcome(rewards, score, outcome.info)


def _number(place: Place, value: Any) -> float:
    if not hasattr(value, "__float__"):  # float() would also read a text
        raise TypeError(f"{describe(place)}: {type(value).__name__} is no number")
    return float(value)


def _check_finite(place: Place, number: float) -> None:
    if not is_finite(number):
        raise ValueError(f"{describe(place)} is {number}, not a finite number")
