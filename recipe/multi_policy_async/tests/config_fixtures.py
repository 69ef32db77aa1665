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
"""A job that composes, and the places where tests change it."""

import json
from pathlib import Path

import pytest

from ..configuration.compose import compose_job
from ..configuration.errors import ConfigError
from ..configuration.schema import JobSpec

PLANNER, SOLVER = "multi_model.models.planner_model", "multi_model.models.solver_model"


def model_folder(path: Path) -> Path:
    """A folder that looks like a model to everything that does not load it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return path


def tiny_overrides(tmp_path: Path) -> list[str]:
    """Overrides of ``planner_solver_tiny`` that let it compose below ``tmp_path``."""
    for role in ("planner", "solver"):
        if not (tmp_path / role).exists():
            model_folder(tmp_path / role)
    tasks = tmp_path / "train.parquet"
    tasks.touch()
    return [
        f"{PLANNER}.model_path={tmp_path}/planner",
        f"{SOLVER}.model_path={tmp_path}/solver",
        f"data.train_files={tasks}",
        "data.val_files=[]",
        "validation.before_training=false",
        "validation.at_end=false",
        f"run.dir={tmp_path}/run",
    ]


def tiny_job(tmp_path: Path, *overrides: str) -> JobSpec:
    return compose_job("planner_solver_tiny", [*tiny_overrides(tmp_path), *overrides])


def problems_of(tmp_path: Path, *overrides: str) -> dict[str, str]:
    """The problems that these overrides cause, keyed by the dotted key each one names."""
    with pytest.raises(ConfigError) as caught:
        tiny_job(tmp_path, *overrides)
    return {problem.key: str(problem) for problem in caught.value.problems}
