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
"""The one place that imports ``verl.experimental.fully_async_policy``.

Upstream is about to move that package into recipes and grows a second trainer (``trainer.v1`` ``separate_async``); a
second adapter replaces this module without touching the rest. Seams that upstream leaves closed are named here.
"""

from functools import partial
from typing import Any

import ray
from omegaconf import DictConfig
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer, TrainingStopException
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

__all__ = [
    "FullyAsyncLLMServerClient",
    "LLMServerManager",
    "Role",
    "TrainingStopException",
    "trainer_base_class",
    "trainer_resources",
    "worker_classes",
    "worker_group_class",
]


def trainer_base_class() -> type:
    """The class under verl's ``FullyAsyncTrainer`` actor.

    Upstream gap: the trainer is published only as a Ray actor class, which cannot be subclassed. The class is used in
    this process and never pickled, so the two-copies trap of by-value pickling cannot occur.
    """
    return FullyAsyncTrainer.__ray_actor_class__


def trainer_roles(config: DictConfig) -> list[Role]:
    """Roles of one model's trainer pool, by verl's own rules."""
    roles = [Role.Actor]
    if need_critic(config):
        roles.append(Role.Critic)
    if need_reference_policy(config):
        roles.append(Role.RefPolicy)
    return roles


def worker_classes(config: DictConfig) -> dict[Role, Any]:
    """Ray worker classes per role, the CPU ones where no accelerator is.

    Upstream gap: ``separation/utils.py:create_role_worker_mapping`` hard-wires the classes.
    """
    if config.trainer.device == "cpu":
        from ..backends.cpu.workers import CpuDetachActorWorker as ActorWorker
        from ..backends.cpu.workers import CpuTrainingWorker as CriticWorker
    else:
        from verl.experimental.separation.engine_workers import DetachActorWorker as ActorWorker
        from verl.workers.engine_workers import TrainingWorker as CriticWorker
    classes = {Role.Actor: ActorWorker, Role.Critic: CriticWorker, Role.RefPolicy: ActorWorker}
    return {role: ray.remote(classes[role]) for role in trainer_roles(config)}


def worker_group_class(master_port_range: tuple[int, int]) -> Any:
    """verl's worker group with this model's own rendezvous ports.

    Without a range verl binds port 0, closes it and uses the number later (collision C11).
    """
    return partial(RayWorkerGroup, master_port_range=list(master_port_range))


def trainer_resources(config: DictConfig, namespace: str) -> ResourcePoolManager:
    """One placement-group pool for this model's trainer ranks, named by the model (collision C1)."""
    pool = f"{namespace}_trainer_pool"
    return ResourcePoolManager(
        resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
        mapping={role: pool for role in trainer_roles(config)},
    )
