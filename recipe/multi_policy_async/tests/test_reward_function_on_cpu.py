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
"""verl's ``reward.custom_reward_function`` judges what agents answer, without verl in the driver's process."""

import asyncio
import json
from pathlib import Path

import pytest

from ..configuration.schema import RewardFunctionSpec
from ..configuration.validate import reward_problems
from ..workflows.base import Task
from ..workflows.dataset import load_tasks
from ..workflows.planner_solver import PlannerSolver
from ..workflows.scoring import load_reward_function
from .config_fixtures import PLANNER, problems_of

# The documented example (docs/data_path.md): full marks for the right number, less for a long way to it.
EXAMPLE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, per_word=0.01):
    words = solution_str.split()
    right = bool(words) and words[-1] == str(ground_truth)
    return {"score": max(0.0, right - per_word * len(words)), "acc": float(right)}
"""
ROW = {
    "data_source": "my/sums",
    "prompt": [{"role": "user", "content": "1+2="}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 7},
}


@pytest.fixture
def written(tmp_path):
    def write(source: str) -> Path:
        file = tmp_path / "my_reward.py"
        file.write_text(source)
        return file

    return write


def score(file: Path, text: str, name: str = "compute_score", **kwargs) -> float:
    task = Task(0, ROW, load_reward_function(str(file), name, kwargs))
    return asyncio.run(task.score(text))


def test_the_function_judges_an_answer_with_the_tasks_ground_truth_and_its_own_arguments(written):
    file = written(EXAMPLE)
    assert score(file, "the sum is 3") == pytest.approx(1 - 0.01 * 4)
    assert score(file, "the sum is 3", per_word=0.1) == pytest.approx(1 - 0.1 * 4)
    assert score(file, "no idea") == 0.0


@pytest.mark.slow
def test_it_gives_what_verls_own_loader_gives(written):
    reward = pytest.importorskip("verl.trainer.ppo.reward")
    from omegaconf import OmegaConf

    file = written(EXAMPLE)
    settings = {"path": str(file), "name": "compute_score", "reward_kwargs": {"per_word": 0.05}}
    verls = reward.get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": settings}}))
    given = verls(data_source="my/sums", solution_str="it is 3", ground_truth="3", extra_info={"index": 7})
    assert score(file, "it is 3", per_word=0.05) == given["score"]


def test_it_may_be_async_and_sees_what_verl_would_show_it(written):
    file = written("""
async def judge(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, solution_str, ground_truth, extra_info) == ("my/sums", "x", "3", {"index": 7})
    extra_info["index"] = 8
    return True
""")
    assert score(file, "x", name="judge") == score(file, "x", name="judge") == 1.0


@pytest.mark.parametrize("value", ["float('nan')", "{'score': float('inf')}"])
def test_a_score_that_is_not_finite_names_the_task(written, value):
    with pytest.raises(ValueError, match="compute_score gave .* task 0, not a finite number"):
        score(written(f"def compute_score(**kwargs): return {value}"), "x")


def test_the_built_in_workflows_are_judged_by_it(written, tmp_path):
    tasks_file = tmp_path / "tasks.jsonl"
    tasks_file.write_text(json.dumps(ROW))
    scorer = load_reward_function(str(written(EXAMPLE)), "compute_score", {"per_word": 0.0})
    [task] = load_tasks({"train_files": str(tasks_file)}, scorer=scorer)

    class Says:
        def __init__(self, text):
            self._text = text

        async def chat(self, messages, **settings):
            return self._text

    outcome = asyncio.run(PlannerSolver().run(task, {"planner": Says("add them"), "solver": Says("it is 3")}))
    assert outcome.rewards == 1.0


def test_a_function_that_is_not_there_is_told(written):
    for path, name, says in [
        (str(written(EXAMPLE)), "other", "has no 'other'"),
        ("nowhere.py", "compute_score", "is not a file"),
        ("pkg://no_such", "compute_score", "there is no module 'no_such'"),
    ]:
        with pytest.raises(ValueError, match=says):
            load_reward_function(path, name, {})


@pytest.mark.slow
def test_the_jobs_function_is_loaded_before_the_job_starts_and_a_models_own_is_refused(tmp_path, written, plain_job):
    assert plain_job.reward.custom_reward_function.path is None
    function = RewardFunctionSpec(path=str(written(EXAMPLE)), name="compute_score", reward_kwargs={"per_word": 0.5})
    assert reward_problems(function) == []
    key, own = "reward.custom_reward_function", f"{PLANNER}.reward.custom_reward_function.path"
    found = problems_of(tmp_path, f"{key}.path=nowhere.py", f"{own}=my_reward.py")
    assert "is not a file" in found[key]
    assert "the job's own reward.custom_reward_function" in found[own]  # it would never be called
