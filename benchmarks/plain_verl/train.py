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
"""Plain ``verl.experimental.fully_async_policy`` on the settings of a one-policy composition of the recipe.

    python -m benchmarks.plain_verl.train --steps 15 --run-dir outputs/plain data.train_files=<parquet>

verl's own main cannot run without a GPU (its worker classes initialise ``cpu:gloo,cpu:gloo``), so this one stands in
for it: verl's task runner, trainer, rollouter, agent loop, reward loop and message queue, on the recipe's CPU backend.
The configuration is the policy's verl tree as the recipe resolves it, so model, data, lengths, batch, learning rate and
staleness cannot differ.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from recipe.multi_policy_async.configuration.compose import compose_job
from recipe.multi_policy_async.configuration.schema import JobSpec

HERE = Path(__file__).resolve().parent
LOGICAL_CPUS = 32  # verl's agent loop, reward and queue actors ask for some too


def compose(steps: int, run_dir: Path, overrides: list[str]) -> JobSpec:
    """The job, of which only the policy's verl tree, the data and the environment are used."""
    lines = [f"run.dir={run_dir}", f"stop.updates={steps}", f"ray_kwargs.ray_init.num_cpus={LOGICAL_CPUS}", *overrides]
    return compose_job("one_policy", lines, HERE / "config")


def plain_config(job: JobSpec) -> Any:
    """The policy's verl configuration with what the recipe does itself given back to verl."""
    from omegaconf import OmegaConf

    (policy,) = job.models.values()
    config = policy.verl_config()
    actor, asynchronous = config.actor_rollout_ref.actor, config.async_training
    samples_per_version = (
        actor.ppo_mini_batch_size * asynchronous.require_batches * asynchronous.trigger_parameter_sync_step
    )
    train_files, val_files = ([str(file) for file in files] for files in (job.data.train_files, job.data.val_files))
    changes = {
        "data.train_files": train_files,
        "data.val_files": val_files or train_files,
        "data.prompt_key": job.data.prompt_key,
        "data.shuffle": job.data.shuffle,
        "data.seed": job.run.seed if job.data.seed is None else job.data.seed,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "data.return_raw_chat": True,
        "rollout.total_rollout_steps": job.stop.updates * samples_per_version,
        "trainer.total_epochs": 1000,
        # One worker each: what two cores can feed, and fewer processes than verl's eight.
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": str(HERE / "reward.py"),
        "reward.custom_reward_function.name": "compute_score",
    }
    for key, value in changes.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of config/one_policy.yaml")
    arguments = parser.parse_intermixed_args()
    run_dir = arguments.run_dir.resolve()
    job = compose(arguments.steps, run_dir, arguments.overrides)
    (run_dir / "metrics").mkdir(parents=True)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(run_dir / "metrics" / "verl.jsonl")

    import ray

    from recipe.multi_policy_async.configuration.ray_cluster import connected

    with connected(job):  # sets VERL_PLATFORM, which verl wants before it is imported
        from .task_runner import CpuTaskRunner

        runner = ray.remote(num_cpus=1)(CpuTaskRunner).remote(run_dir / "metrics" / "steps.jsonl")
        ray.get(runner.run.remote(plain_config(job)))


if __name__ == "__main__":
    main()
