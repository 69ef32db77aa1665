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
"""The planner-solver workflow: who sees what, and whose answer is scored."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from recipe.multi_policy_async.tests.fakes.chat_agent import QUESTION, ChatAgent, chain_sum_task
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.loader import BUILT_IN, load_workflow_class
from recipe.multi_policy_async.workflows.planner_solver import PlannerSolver, PlannerSolverVerifier
from recipe.multi_policy_async.workflows.scoring import extract_answer, score_message


def play(workflow: Any, task: Task, **replies: str) -> tuple[Outcome, dict[str, ChatAgent]]:
    agents = {agent_id: ChatAgent(reply) for agent_id, reply in replies.items()}
    return asyncio.run(workflow.run(task, agents)), agents


def test_the_solver_sees_the_planners_message_and_nothing_of_the_question() -> None:
    _, agents = play(PlannerSolver(), chain_sum_task(), planner="add {3} and 5", solver="8")
    assert agents["planner"].asked == [[{"role": "user", "content": QUESTION}]]
    assert agents["solver"].asked == [[{"role": "user", "content": "add {3} and 5"}]]


def test_prompts_are_put_around_question_and_plan() -> None:
    workflow = PlannerSolver(planner_prompt="Restate: {question}", solver_prompt="Compute: {plan}")
    _, agents = play(workflow, chain_sum_task(), planner="3 plus 5", solver="8")
    assert agents["planner"].asked[0][0]["content"] == f"Restate: {QUESTION}"
    assert agents["solver"].asked[0][0]["content"] == "Compute: 3 plus 5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "reward"), [("8", 1.0), ("3 + 5 = 8.", 1.0), ("9", 0.0), ("eight", 0.0), ("", 0.0)]
)
def test_the_reward_is_the_verifiers_score_of_the_solvers_answer(message: str, reward: float) -> None:
    outcome, _ = play(PlannerSolver(), chain_sum_task(scorer=None), planner="3 plus 5", solver=message)
    assert outcome.rewards == reward
    assert outcome.info == {"plan": "3 plus 5", "answer": message}


@pytest.mark.parametrize(
    ("message", "num_terms", "called"), [("8", 2, False), ("no idea", 2, True), ("8", 3, True), ("", 3, True)]
)
def test_the_verifier_is_asked_only_about_ill_formed_answers_and_hard_questions(
    message: str, num_terms: int, called: bool
) -> None:
    task = chain_sum_task(num_terms=num_terms)
    outcome, agents = play(PlannerSolverVerifier(), task, planner="3 plus 5", solver=message, verifier="7")
    assert bool(agents["verifier"].asked) is called
    assert outcome.rewards == (0.0 if called else 1.0)
    if called:
        assert agents["verifier"].asked[0][0]["content"] == f"3 plus 5 = {message}"


@pytest.mark.parametrize("check_every", [0, 5])
def test_a_sample_of_all_tasks_is_checked_where_one_is_asked_for(check_every: int) -> None:
    workflow = PlannerSolverVerifier(check_every=check_every)
    checked = [i for i in range(12) if workflow.needs_check(chain_sum_task(i), "8")]
    assert checked == ([0, 5, 10] if check_every else [])


def test_a_sample_of_a_negative_number_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="check_every is -1"):
        PlannerSolverVerifier(check_every=-1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8", "8"),
        ("-8", "-8"),
        ("3 + 5 = 8.", "8"),
        ("8-5", "5"),
        ("1,234.5 apples", "1,234.5"),
        ("<answer> 7 </answer> 3", "7"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_message_is_its_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text, numeric=True) == answer


def test_a_message_is_its_own_answer_when_no_number_is_expected() -> None:
    assert extract_answer(" True ", numeric=False) == "True"
    assert extract_answer("I say <answer>no</answer>", numeric=False) == "no"


@pytest.mark.slow
def test_other_data_sources_are_scored_by_verls_own_scorer() -> None:
    pytest.importorskip("verl")
    task = Task(0, {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "8"}, "extra_info": {}})
    assert score_message(task, "3 + 5 = 8 #### 8") == 1.0
    assert score_message(task, "3 + 5 = 8 #### 9") == 0.0


@pytest.mark.slow
def test_an_unknown_data_source_is_an_error() -> None:
    pytest.importorskip("verl")
    task = Task(0, {"data_source": "unheard/of", "reward_model": {"ground_truth": "8"}, "extra_info": {}})
    with pytest.raises(NotImplementedError):
        score_message(task, "8")


@pytest.mark.parametrize("name", ["planner_solver", "planner_solver_verifier"])
def test_the_built_in_names_find_the_workflows(name: str) -> None:
    workflow: Callable[[], Any] = load_workflow_class(name)
    assert name in BUILT_IN and callable(workflow().run)
