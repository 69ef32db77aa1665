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
"""The summary behind a script's PASS."""

import json

import pytest
import yaml

from ..run_summary import main, summarize


def write_run(run_dir, versions: dict[str, list[int]], target: int | None = 2) -> None:
    (run_dir / "config").mkdir(parents=True)
    (run_dir / "metrics").mkdir()
    models = {model_id: {"train": True, "target_updates": target} for model_id in ("planner", "solver")}
    models["frozen"] = {"train": False, "target_updates": None}
    (run_dir / "config" / "job.yaml").write_text(yaml.safe_dump({"models": models}))
    steps = [
        {"model_id": model_id, "version": version, "reward": version / 10}
        for model_id, own in versions.items()
        for version in own
    ]
    (run_dir / "metrics" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_a_run_whose_policies_all_reached_their_target_passes(tmp_path):
    write_run(tmp_path, {"planner": [1, 2], "solver": [1, 2, 3]})
    assert main([str(tmp_path)]) == 0


@pytest.mark.parametrize("solver", [[], [1]])
def test_one_policy_short_of_its_target_fails_the_run(tmp_path, solver):
    write_run(tmp_path, {"planner": [1, 2], "solver": solver})
    assert main([str(tmp_path)]) == 1


def test_a_policy_that_never_trained_fails_a_run_without_targets_too(tmp_path):
    write_run(tmp_path, {"planner": [1]}, target=None)
    assert main([str(tmp_path)]) == 1


def test_rewards_are_means_over_the_first_and_the_last_steps(tmp_path):
    write_run(tmp_path, {"planner": [1, 2, 3, 4, 5], "solver": [1]})
    planner, solver = summarize(tmp_path)
    assert (planner.first_reward, planner.last_reward) == (pytest.approx(0.2), pytest.approx(0.4))
    assert solver.first_reward == solver.last_reward == pytest.approx(0.1)


def test_the_first_the_best_and_the_last_evaluation_are_told(tmp_path, capsys):
    write_run(tmp_path, {"planner": [1, 2], "solver": [1, 2]})
    spans = [("0.0", "0.1"), ("0.2", "0.2"), ("0.4", "0.4")]
    evaluations = [
        {"score": score, "workflows": 8, "failed": failed, "first": {"planner": first}, "last": {"planner": last}}
        for score, failed, (first, last) in zip((0.25, 0.75, 0.5), (0, 0, 3), spans, strict=True)
    ]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evaluations))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "validation, first: score 0.250 of 8 workflows, by planner 0.0 to 0.1",
        "validation, best: score 0.750 of 8 workflows, by planner 0.2",
        "validation, last: score 0.500 of 8 workflows, 3 failed, by planner 0.4",
    ]


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
