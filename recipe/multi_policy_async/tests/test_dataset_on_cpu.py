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
"""Tasks from verl's data section, their order, and what loads a workflow."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.multi_policy_async.workflows.base import Outcome, Task, as_outcome
from recipe.multi_policy_async.workflows.dataset import load_tasks
from recipe.multi_policy_async.workflows.loader import load_workflow_class
from recipe.multi_policy_async.workflows.task_plan import plan_tasks, task_order


def _row(index: int, **changes) -> dict:
    return {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{index} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
    } | changes


def _parquet(path, indices) -> str:
    pq.write_table(pa.Table.from_pylist([_row(i) for i in indices]), path)
    return str(path)


def _jsonl(path, indices) -> str:
    path.write_text("".join(json.dumps(_row(i)) + "\n" for i in indices))
    return str(path)


def _data(*files, **changes) -> dict:
    return {"train_files": list(files), "val_files": None, "train_max_samples": -1, "shuffle": False} | changes


def test_rows_of_several_files_of_both_kinds_follow_one_another(tmp_path):
    tasks = load_tasks(_data(_parquet(tmp_path / "a.parquet", range(3)), _jsonl(tmp_path / "b.jsonl", range(3, 5))))
    assert len(tasks) == 5
    assert [tasks[i].question for i in range(5)] == [f"{i} + 1?" for i in range(5)]
    assert [tasks[i].ground_truth for i in range(5)] == ["1", "2", "3", "4", "5"]
    assert tasks[4]["extra_info"] == {"index": 4} and tasks[4].index == 4
    assert tasks[0].prompt[0] == {"role": "system", "content": "Be brief."}


def test_one_path_instead_of_a_list_and_the_validation_files(tmp_path):
    tasks = load_tasks(_data(val_files=_parquet(tmp_path / "a.parquet", range(2)), val_max_samples=1), "val")
    assert len(tasks) == 1


def test_a_bare_string_under_another_key_is_one_user_message(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?"}) + "\n")
    (task,) = [load_tasks(_data(str(path), prompt_key="problem"))[0]]
    assert task.prompt == [{"role": "user", "content": "1 + 1?"}] and task.ground_truth is None


@pytest.mark.parametrize("shuffle", [False, True])
def test_max_samples_chooses_as_verl_does(tmp_path, shuffle):
    tasks = load_tasks(
        _data(_parquet(tmp_path / "a.parquet", range(50)), train_max_samples=10, shuffle=shuffle, seed=3)
    )
    chosen = [tasks[i]["extra_info"]["index"] for i in range(len(tasks))]
    assert len(set(chosen)) == 10 and (chosen == list(range(10))) is not shuffle


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: _data(), "data.train_files names no file"),
        (lambda d: _data(str(d / "none.parquet")), "none.parquet is not a file"),
        (lambda d: _data(_jsonl(d / "empty.jsonl", [])), "no rows in"),
        (lambda d: _data(_jsonl(d / "a.jsonl", [0]), prompt_key="question"), "no column 'question'.*prompt"),
    ],
)
def test_wrong_data_is_a_clear_error(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        load_tasks(make(tmp_path))


def test_a_file_of_another_kind_is_a_clear_error(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match="neither .parquet nor .jsonl"):
        load_tasks(_data(str(tmp_path / "a.csv")))


def test_every_epoch_has_every_task_once_in_an_order_of_its_own():
    orders = [task_order(30, epoch, shuffle=True, seed=5) for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(30))] * 2
    assert orders[0] != orders[1] and orders[0] == task_order(30, 0, shuffle=True, seed=5)
    assert task_order(4, 1, shuffle=False, seed=5) == [0, 1, 2, 3]


def test_the_plan_goes_on_where_an_earlier_process_stopped():
    settings = {"shuffle": True, "seed": 1, "epochs": 2, "max_tasks": 7}
    whole = list(plan_tasks(4, started={}, **settings))
    assert len(whole) == 7
    started: dict[int, set[int]] = {}
    for epoch, task in whole[:5]:
        started.setdefault(epoch, set()).add(task)
    assert list(plan_tasks(4, started=started, **settings)) == whole[5:]


def test_without_a_number_of_epochs_the_plan_has_no_end():
    plan = plan_tasks(2, shuffle=False, seed=0, epochs=None, max_tasks=None, started={})
    assert [next(plan) for _ in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (1, Outcome(1.0, 1.0)),
        (True, Outcome(1.0, 1.0)),
        ({"a": 1.0, "b": 0.0}, Outcome({"a": 1.0, "b": 0.0}, 0.5)),
        (Outcome({"a": 1.0}, score=0.25), Outcome({"a": 1.0}, 0.25)),
        ([1, 0], Outcome([1.0, 0.0], 0.5)),
        (np.zeros(2), Outcome([0.0, 0.0], 0.0)),
        ({"a": [1, 0], "b": {"2": 1}, "c": []}, Outcome({"a": [1.0, 0.0], "b": {2: 1.0}, "c": []}, 0.75)),
        (Outcome(None), Outcome(None)),  # the agents post them
    ],
)
def test_what_a_workflow_returns_is_a_reward_and_a_score(result, outcome):
    assert as_outcome(result) == outcome


@pytest.mark.parametrize(
    "result",
    [None, "1.0", {}, [], {"a": None}, {1: 1.0}, {"a": "1"}, {"a": {"x": 1.0}}, {"a": {True: 1.0}}, {"a": [[1.0]]}]
    + [np.zeros((2, 2)), Outcome(1.0, score=[1]), 10**400],
)
def test_what_is_no_reward_is_refused(result):
    with pytest.raises(ValueError, match="must return a number"):
        as_outcome(result)


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (float("nan"), "reward"),
        (np.float32("inf"), "reward"),
        ({"a": 1.0, "b": float("-inf")}, "b"),
        ({"a": [1.0, float("nan")]}, r"a\[1\]"),
        ([1.0, float("nan")], r"reward\[1\]"),
        (Outcome(1.0, score=float("nan")), "score"),
        ({"a": 1e39, "b": 0.0}, "a"),  # infinite to trainers, which compute with float32
    ],
)
def test_a_reward_or_score_that_is_not_finite_is_refused_by_its_name(result, name):
    with pytest.raises(ValueError, match=f"{name} is .*, not a finite number"):
        as_outcome(result)


def test_a_task_without_a_user_message_is_a_clear_error():
    with pytest.raises(ValueError, match="task 3: its prompt has no user message"):
        _ = Task(3, {"prompt": [{"role": "system", "content": "x"}]}).question


WORKFLOW_FILE = """
from dataclasses import dataclass

@dataclass
class Mine:
    bonus: float = 0.0

    async def run(self, task, agents):
        return self.bonus

not_a_class = 3

class NoRun:
    pass
"""


def test_a_workflow_is_loaded_from_a_file_a_module_or_by_a_built_in_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WORKFLOW_FILE)
    assert load_workflow_class("Mine", str(path))(bonus=0.5).bonus == 0.5
    module = "recipe.multi_policy_async.workflows.planner_solver"
    expected = load_workflow_class("planner_solver")
    assert load_workflow_class(f"{module}.PlannerSolver") is expected
    assert load_workflow_class("PlannerSolver", f"pkg://{module}") is expected


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("nothing", None, "neither a dotted class name nor one of planner_solver"),
        ("nothing.here", None, "there is no module 'nothing'"),
        ("Absent", "mine.py", "no class 'Absent'"),
        ("not_a_class", "mine.py", "no class 'not_a_class'"),
        ("NoRun", "mine.py", "no class 'NoRun' with a run method"),
        ("Mine", "absent.py", "is not a file"),
    ],
)
def test_a_workflow_that_cannot_be_loaded_is_a_clear_error(tmp_path, name, path, message):
    (tmp_path / "mine.py").write_text(WORKFLOW_FILE)
    with pytest.raises(ValueError, match=message):
        load_workflow_class(name, path and str(tmp_path / path))


def test_an_import_error_inside_a_users_file_is_shown_as_it_is(tmp_path):
    (tmp_path / "mine.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_workflow_class("Mine", str(tmp_path / "mine.py"))


@pytest.mark.slow
def test_the_data_path_imports_neither_torch_nor_verl_nor_ray():
    program = (
        "import recipe.multi_policy_async.workflow_driver, recipe.multi_policy_async.trajectory_ingestor\n"
        "import recipe.multi_policy_async.ingest.training_queue, recipe.multi_policy_async.workflows.loader, sys\n"
        "print(sorted({'torch', 'verl', 'transformers', 'ray', 'openai', 'pandas'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
