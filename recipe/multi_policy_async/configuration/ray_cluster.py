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
"""Start or join the Ray cluster of a job."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from .resources import Node, local_ray_resources
from .schema import JobSpec
from .training_checks import CPU_PLUGIN, user_modules

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that other hosts see

END_GRACE_S = 10.0
"""Workers end by themselves once their node is gone."""


def environment(job: JobSpec) -> dict[str, str]:
    """Environment of every process of the job. What the user's shell sets wins, but for the platform."""
    ranks = sum(policy.trainer_gpus + policy.rollout_gpus for policy in job.models.values())
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if job.device == "cpu":
        # Ranks share the cores; more threads than cores only make them wait for each other.
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    modules = user_modules()
    if job.device == "cpu":
        variables["VERL_PLATFORM"] = "cpu"
        # Where the package is installed its entry point does the same; a folder in a verl checkout has none.
        modules.append(CPU_PLUGIN)
    if modules:
        variables["VERL_USE_EXTERNAL_MODULES"] = ",".join(dict.fromkeys(modules))
    return variables


def init_arguments(job: JobSpec) -> dict[str, Any]:
    """Arguments of ``ray.init``: the user's, and what they leave null.

    Without an address (``ray_init.address`` or RAY_ADDRESS) a Ray of our own is started, also where another one runs:
    it binds loopback, and its processes inherit this environment, which is quicker than a runtime environment. On a
    running cluster a runtime environment carries it.
    """
    given = {key: value for key, value in job.ray_kwargs.ray_init.items() if value is not None}
    given.setdefault("logging_level", logging.ERROR)
    if given.get("address") or os.environ.get("RAY_ADDRESS"):
        runtime = dict(given.get("runtime_env") or {})
        runtime["env_vars"] = {**environment(job), **(runtime.get("env_vars") or {})}
        return {"log_to_driver": False, **given, "runtime_env": runtime}
    local = {"address": "local", "_node_ip_address": LOOPBACK, "log_to_driver": False}
    return {**local, **local_ray_resources(job), **given}


@contextlib.contextmanager
def connected(job: JobSpec) -> Iterator[None]:
    """``ray.init`` for this job. Ray itself leaves before the processes that it started are gone; this does not."""
    os.environ.update(environment(job))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    before = _descendants()
    try:
        ray.init(**init_arguments(job))
        yield
    finally:
        started = _descendants() - before
        ray.shutdown()
        end_processes(started)


def end_processes(processes: set[psutil.Process], grace_s: float = END_GRACE_S) -> None:
    """Wait until these have ended; kill what has not within ``grace_s`` seconds."""
    deadline = time.monotonic() + grace_s
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in alive:
        logger.warning("process %d did not end with Ray and is killed", process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is not: where nobody collects it, it stays."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def available_nodes() -> list[Node]:
    """Free resources per node, counted as verl counts them (GPU, else NPU)."""
    nodes = ray._private.state.available_resources_per_node()
    return [Node(name, free.get("GPU", free.get("NPU", 0)), free.get("CPU", 0)) for name, free in sorted(nodes.items())]
