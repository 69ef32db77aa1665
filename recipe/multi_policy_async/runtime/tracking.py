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
"""verl's ``Tracking`` with the policy's name in front of every metric."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.tracking import Tracking


class PolicyTracking:
    """One policy's metrics as ``<model_id>/<metric>``, in files of their own (collision C13).

    verl's trackers name files by project and experiment, or by environment variables that hold one path for all; this
    process belongs to one policy, so the variables are set here. The file of a restored policy carries its incarnation,
    ``<model_id>.1.jsonl``: verl's logger begins its file anew.
    """

    def __init__(self, model_id: str, config: DictConfig, run_dir: Path, incarnation: int):
        self._prefix = f"{model_id}/"
        (run_dir / "metrics").mkdir(parents=True, exist_ok=True)
        name = f"{model_id}.{incarnation}" if incarnation else model_id
        os.environ["TENSORBOARD_DIR"] = str(run_dir / "tensorboard" / model_id)
        os.environ["VERL_FILE_LOGGER_PATH"] = str(run_dir / "metrics" / f"{name}.jsonl")
        self._tracking = Tracking(
            project_name=config.trainer.project_name,
            experiment_name=config.trainer.experiment_name,
            default_backend=list(config.trainer.logger),
            config=OmegaConf.to_container(config, resolve=True),
        )

    def log(self, data: dict[str, Any], step: int) -> None:
        if data:
            self._tracking.log({self._prefix + key: value for key, value in data.items()}, step=step)

    def finish(self) -> None:
        self._tracking.finish()
