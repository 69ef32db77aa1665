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
"""verl's own fully async task runner on a CPU: the seams that its main leaves closed, and a record of every step."""

import json
import time
from pathlib import Path
from typing import Any

import ray
from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.separation.utils import create_resource_pool_manager

from recipe.multi_policy_async.backends.cpu import replica  # noqa: F401  (registers itself, in the rollouter too)
from recipe.multi_policy_async.runtime.verl_adapter import worker_classes

KEPT_METRICS = (
    "prompt_length/mean",
    "response_length/mean",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/timing_s/param_sync",
    "fully_async/count/stale_trajectory_processed",
)


def recording_trainer(steps_file: Path) -> Any:
    """verl's trainer as an actor class that appends a line per trained step, with the keys of the recipe's.

    Built in a function, so that it and verl's class below the actor are pickled together, by value.
    """
    trainer = FullyAsyncTrainer.__ray_actor_class__

    class RecordingTrainer(trainer):
        def _fit_postprocess_step(self) -> None:
            trainer._fit_postprocess_step(self)
            record = {
                "version": self.current_param_version,
                "reward": float(self.metrics["critic/score/mean"]),
                "time": time.time(),
                "metrics": {key: float(value) for key, value in self.metrics.items() if key in KEPT_METRICS},
            }
            with steps_file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    return ray.remote(num_cpus=1)(RecordingTrainer)


class CpuRollouter(FullyAsyncRollouter.__ray_actor_class__):
    """Upstream's, unchanged: pickled by reference, it makes the rollouter's process import this module."""


class CpuTaskRunner(FullyAsyncTaskRunner.__ray_actor_class__):
    """Upstream hard-wires the worker classes and takes a run that lost its producer for a success.

    Args:
        steps_file: where the steps are written down.
    """

    def __init__(self, steps_file: Path):
        super().__init__()
        self._steps_file = steps_file

    def _create_trainer(self, config: Any) -> None:
        """Upstream's, with the worker classes for this device."""
        workers = worker_classes(config)
        trainer = recording_trainer(self._steps_file).remote(
            config=config,
            tokenizer=self.components["tokenizer"],
            role_worker_mapping=workers,
            resource_pool_manager=create_resource_pool_manager(config, roles=list(workers)),
            ray_worker_group_cls=self.components["ray_worker_group_cls"],
            device_name=config.trainer.device,
        )
        ray.get(trainer.init_workers.remote())
        self.components["trainer"] = trainer

    def _create_rollouter(self, config: Any) -> None:
        """Upstream's, with the rollouter of this module and fewer logical CPUs."""
        rollouter = ray.remote(num_cpus=1, max_concurrency=100)(CpuRollouter).remote(
            config=config,
            tokenizer=self.components["tokenizer"],
            processor=self.components["processor"],
            device_name=config.trainer.device,
        )
        ray.get(rollouter.init_workers.remote())
        ray.get(rollouter.set_max_required_samples.remote())
        self.components["rollouter"] = rollouter

    def _run_training_loop(self) -> None:
        """Upstream's, but over when the trainer is: the rollouter may take ten seconds more.

        Raises:
            RuntimeError: fewer steps were trained than the samples were meant for.
        """
        trainer, rollouter = self.components["trainer"], self.components["rollouter"]
        training, rollouts = trainer.fit.remote(), rollouter.fit.remote()
        while True:
            done, _ = ray.wait([training, rollouts], num_returns=1)
            ray.get(done)
            if training in done:
                break
            ray.wait([training], num_returns=1)
        wanted = ray.get(rollouter.get_total_train_steps.remote())
        trained = len(self._steps_file.read_text().splitlines())
        if trained != wanted:
            raise RuntimeError(f"trained {trained} steps of {wanted}; the rollouter's log has the cause")
