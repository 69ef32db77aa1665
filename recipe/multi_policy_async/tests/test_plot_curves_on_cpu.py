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
"""Curves of several runs: read from metrics files, compared, drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.multi_policy_async.assets.plot_curves import STEPS_FILE, main, read_curve, rise


def write_steps(run_dir: Path, rewards: dict[str, list[float]]) -> Path:
    lines = [
        {"model_id": model_id, "version": version, "reward": reward, "counts": {}}
        for model_id, series in rewards.items()
        for version, reward in enumerate(series, start=1)
    ]
    return write_lines(run_dir / STEPS_FILE, lines) and run_dir


def write_lines(file: Path, lines: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_curve_is_the_mean_over_the_policies_that_trained(tmp_path: Path) -> None:
    run_dir = write_steps(tmp_path, {"planner_model": [0.2, 0.4], "solver_model": [0.4, 0.6, 0.8]})
    assert read_curve(run_dir, "version", "reward") == pytest.approx({1: 0.3, 2: 0.5, 3: 0.8})


def test_verls_file_logger_is_read_by_the_names_of_its_metrics(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "planner_model.jsonl",
        [
            {"step": 1, "data": {"planner_model/critic/score/mean": 0.25}},
            {"step": 1, "data": {"planner_model/other": 9}},
        ],
    )
    assert read_curve(file, "step", "planner_model/critic/score/mean") == {1: 0.25}


def test_start_and_end_are_means_over_the_window() -> None:
    measured = rise({1: 0.0, 2: 0.2, 3: 0.9, 4: 0.5, 5: 0.7}, window=2)
    assert (measured.start, measured.end, measured.gain) == pytest.approx((0.1, 0.6, 0.5))


def test_the_table_shows_every_version_and_each_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = write_steps(tmp_path / "both", {"planner_model": [0.3, 0.6, 0.9]})
    frozen = write_steps(tmp_path / "frozen", {"planner_model": [0.3, 0.4]})
    main([f"both={both}", f"planner_frozen={frozen}", "--window", "1", "--min-gain", "0.3", "--min-lead", "0.1"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["version", "both", "planner_frozen"],
        ["1", "0.300", "0.300"],
        ["2", "0.600", "0.400"],
        ["3", "0.900"],
        ["start", "0.300", "0.300"],
        ["end", "0.900", "0.400"],
        ["gain", "0.600", "0.100"],
    ]


@pytest.mark.parametrize(
    ("frozen", "complaint"), [([0.3, 0.35], "both gained 0.100, less than 0.3"), ([0.3, 0.39], "more than frozen")]
)
def test_a_gain_or_a_lead_that_is_missed_fails(tmp_path: Path, frozen: list[float], complaint: str) -> None:
    both = write_steps(tmp_path / "both", {"planner_model": [0.3, 0.4]})
    other = write_steps(tmp_path / "frozen", {"planner_model": frozen})
    with pytest.raises(SystemExit, match=complaint):
        main([f"both={both}", f"frozen={other}", "--window", "1", "--min-gain", "0.3", "--min-lead", "0.05"])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = write_steps(tmp_path / "both", {"planner_model": [0.3, 0.6, 0.9]})
    main([f"both={both}", "--png", str(tmp_path / "pictures" / "curves.png")])
    assert (tmp_path / "pictures" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="steps.jsonl is not a file"):
        main([f"both={tmp_path}"])
