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
"""verl's ``Tracking`` for the metrics of the whole team, which belong to no policy's process."""

import contextlib
import importlib.util
import io
import logging
import os
from typing import Any

from .configuration.schema import JobSpec
from .configuration.verl_tree import find_verl
from .validation_scheduler import Evaluation

logger = logging.getLogger(__name__)

NAME = "validation"


class TeamTracking:
    """A run of its own beside those of the policies; its backends are opened with the first metrics.

    Args:
        job: the job.
    """

    def __init__(self, job: JobSpec):
        self._job = job
        self._tracking: Any = None

    def log(self, evaluation: Evaluation) -> None:
        """Log to every backend of ``metrics.backends``; the step is the number of versions that the team has made."""
        if self._tracking is None:
            self._tracking = self._open()
        self._tracking.log(metrics(evaluation), step=evaluation.updates)

    def finish(self) -> None:
        """Close the backends; one that cannot be closed is logged."""
        if self._tracking is None:
            return
        try:
            self._tracking.finish()
        except Exception:  # of any tracker's client; the policies are trained, and that decides how the job ended
            logger.warning("the trackers of the team's metrics were not closed", exc_info=True)

    def _open(self) -> Any:
        run = self._job.run
        (run.dir / "metrics").mkdir(parents=True, exist_ok=True)
        os.environ["TENSORBOARD_DIR"] = str(run.dir / "tensorboard" / NAME)
        former = len(list((run.dir / "metrics").glob(f"{NAME}*.jsonl")))  # verl's logger begins its file anew
        name = f"{NAME}.{former}" if former else NAME
        os.environ["VERL_FILE_LOGGER_PATH"] = str(run.dir / "metrics" / f"{name}.jsonl")
        with contextlib.redirect_stdout(io.StringIO()):  # it says where it writes, between the job's lines
            return _tracking_class()(
                project_name=run.name,
                experiment_name=NAME,
                default_backend=list(self._job.metrics.backends),
                config={"trainer": {}} | self._job.model_dump(mode="json", exclude={"models"}),
            )


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """``validation/...`` for the team, ``validation/<agent>/reward``, ``validation/versions/<model>/...``."""
    report = evaluation.report
    data: dict[str, float] = {
        "validation/score": report.score,
        "validation/workflows": report.workflows,
        "validation/failed": report.failed,
        "validation/seconds": report.seconds,
    }
    data |= {f"validation/{agent}/reward": reward for agent, reward in report.rewards.items()}
    for which, vector in (("first", report.first), ("last", report.last)):
        data |= {f"validation/versions/{model_id}/{which}": version.number for model_id, version in vector.items()}
    return data


def _tracking_class() -> Any:
    """``verl.utils.tracking.Tracking``, read from its file: importing its package takes torch, Ray and five seconds."""
    file = find_verl() / "utils" / "tracking.py"
    spec = importlib.util.spec_from_file_location("verl_utils_tracking", file)
    assert spec is not None and spec.loader is not None, f"{file} is a module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tracking
