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
"""What the actors of gateway and workflow driver are given of the job."""

import json

import pytest

pytest.importorskip("ray")

from ... import launch  # noqa: E402
from ..config_fixtures import tiny_job  # noqa: E402

pytestmark = pytest.mark.slow  # whole jobs are composed


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Builds the actor's class in this process, whose output stays where it is."""
    monkeypatch.setattr(launch, "enter_component", lambda name, run_dir: None)
    for split in ("train", "val"):
        rows = [{"prompt": [{"role": "user", "content": f"{split} {i}"}]} for i in range(100)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def build(*overrides: str) -> launch.WorkflowDriverActor:
        files = [f"data.train_files={tmp_path}/train.jsonl", "data.train_max_samples=5"]
        job = tiny_job(tmp_path, *files, *overrides)
        return launch.WorkflowDriverActor(job, None, "http://127.0.0.1:1", "key")

    return build


def questions(tasks) -> list[str]:
    return [tasks[index].question for index in range(len(tasks))]


def order(driver) -> tuple[list[str], int]:
    """Tasks that are played, and the seed of the order in which they are."""
    return questions(driver._tasks), driver._plan["seed"]


def test_the_datas_own_seed_decides_which_tasks_are_played_and_in_which_order(driver):
    chosen = order(driver("data.seed=0", "run.seed=1"))
    assert chosen == order(driver("data.seed=0", "run.seed=2"))
    assert chosen != order(driver("data.seed=3", "run.seed=1"))


def test_without_one_the_runs_seed_does(driver):
    assert order(driver("run.seed=4")) == order(driver("run.seed=5", "data.seed=4"))


def test_the_driver_can_evaluate_where_the_job_names_files_for_it(driver, tmp_path):
    assert driver()._evaluator is None
    able = driver(f"data.val_files={tmp_path}/val.jsonl", "data.val_max_samples=3", "data.shuffle=false")
    assert questions(able._evaluator._tasks) == ["val 0", "val 1", "val 2"]


def test_the_gateway_mixes_rewards_as_the_workflow_section_says(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "enter_component", lambda name, run_dir: None)
    monkeypatch.setattr(launch, "calm_collector", lambda: None)
    job = tiny_job(tmp_path, "workflow.team_share={planner: 0.25}")
    gateway = launch.GatewayActor(job, None, 0, "key")
    assert gateway.service.closer._team_share == {"planner": 0.25}
