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
"""A planner that sees the question, a solver that sees only the planner's message, and at times a verifier."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Outcome, Task
from .scoring import REASONING_GYM, extract_answer, is_number

Examples = Sequence[Sequence[str]]
"""Pairs of a user message and the reply to it, told before the prompt: small models need to be shown."""


class PlannerSolver:
    """The planner's message is all that the solver learns of the question; the verifier's score is everybody's reward.

    Args:
        planner_prompt: the planner's user message; ``{question}`` stands for the task's question.
        solver_prompt: the solver's user message; ``{plan}`` stands for the planner's message.
        planner_examples: pairs of a user message and its reply, as they are.
        solver_examples: likewise.

    Agents: ``planner``, ``solver``.
    """

    agents: tuple[str, ...] = ("planner", "solver")

    def __init__(
        self,
        planner_prompt: str = "{question}",
        solver_prompt: str = "{plan}",
        planner_examples: Examples = (),
        solver_examples: Examples = (),
    ):
        self._planner_prompt = planner_prompt
        self._solver_prompt = solver_prompt
        self._planner_examples = checked_examples("planner_examples", planner_examples)
        self._solver_examples = checked_examples("solver_examples", solver_examples)

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        """Play one episode.

        Args:
            task: a row of ``assets/prepare_tasks.py``, or of verl's GSM8K preparation.
            agents: agent id -> agent with ``async chat(messages) -> str``.

        Returns:
            The score of the final message, usually in [0, 1], as everybody's reward.
        """
        plan, message = await self.plan_and_solve(task, agents)
        return await judge(task, message, plan=plan)

    async def plan_and_solve(self, task: Task, agents: Mapping[str, Any]) -> tuple[str, str]:
        """The planner's and the solver's messages."""
        plan = await ask(agents["planner"], self._planner_prompt, self._planner_examples, question=task.question)
        return plan, await ask(agents["solver"], self._solver_prompt, self._solver_examples, plan=plan)


class PlannerSolverVerifier(PlannerSolver):
    """As above, but some answers are checked: then the verifier's message is the final one.

    Checked are ill-formed answers (no number where one is expected), hard questions, and a sample of all tasks, so the
    verifier is called in a part of the workflows only.

    Args:
        verifier_prompt: the verifier's user message, with ``{plan}`` and ``{answer}``.
        check_from_terms: reasoning-gym questions with at least so many terms are hard; other tasks are never hard.
        check_every: every so many-th task of the dataset is checked in any case; 0: none.
        others: as for ``PlannerSolver``.

    Agents: ``planner``, ``solver``, ``verifier``.
    """

    agents = ("planner", "solver", "verifier")

    def __init__(
        self,
        verifier_prompt: str = "{plan} = {answer}",
        check_from_terms: int = 3,
        check_every: int = 0,
        **others: Any,
    ):
        if check_every < 0:
            raise ValueError(f"check_every is {check_every}, not 0 or a number of tasks")
        super().__init__(**others)
        self._verifier_prompt = verifier_prompt
        self._check_from_terms = check_from_terms
        self._check_every = check_every

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        plan, message = await self.plan_and_solve(task, agents)
        if not self.needs_check(task, message):
            return await judge(task, message, plan=plan)
        checked = await ask(agents["verifier"], self._verifier_prompt, (), plan=plan, answer=message)
        return await judge(task, checked, plan=plan, unchecked_answer=message)

    def needs_check(self, task: Task, message: str) -> bool:
        """Whether the solver's message goes to the verifier."""
        if extract_answer(message, is_number(str(task.ground_truth))) is None:
            return True
        if self._check_every and task.index % self._check_every == 0:
            return True
        if not task["data_source"].startswith(REASONING_GYM):
            return False
        entry = json.loads(task["extra_info"]["entry"])
        return entry["metadata"].get("num_terms", 0) >= self._check_from_terms


def checked_examples(name: str, examples: Examples) -> list[dict[str, str]]:
    """The examples as chat messages.

    Raises:
        ValueError: an entry is not a pair of texts.
    """
    for pair in examples:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"{name}: {pair!r} is not a pair of a user message and the reply to it")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in examples for role, text in zip(roles, pair, strict=True)]


async def ask(agent: Any, prompt: str, examples: Sequence[Mapping[str, str]], **parts: str) -> str:
    """One call. ``replace``, not ``format``: what models write may hold braces."""
    for name, text in parts.items():
        prompt = prompt.replace(f"{{{name}}}", text)
    return await agent.chat([*examples, {"role": "user", "content": prompt}])


async def judge(task: Task, message: str, **info: str) -> Outcome:
    """Score the final message."""
    return Outcome(await task.score(message), info={"answer": message, **info})
