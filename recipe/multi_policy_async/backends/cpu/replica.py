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
"""verl's rollout replica ``hf``: one process per replica, transformers on the CPU.

Importing this module registers the replica under ``actor_rollout_ref.rollout.name=hf``.
"""

import ray
from omegaconf import DictConfig
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "hf"


class HFReplica(RolloutReplica):
    """verl's ``RolloutReplica`` (``verl/workers/rollout/replica.py``) whose worker is its server.

    ``rollout.custom.namespace`` names the placement group and the actor, so that the replicas of several models live
    in one Ray job (C2, C3).

    Raises:
        ValueError: the replica would span several processes.
    """

    def __init__(
        self,
        replica_rank: int,
        config: RolloutConfig,
        model_config: DictConfig,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ):
        namespace = (config.custom or {}).get("namespace", "")
        super().__init__(
            replica_rank,
            config,
            model_config,
            gpus_per_node,
            is_reward_model,
            is_teacher_model,
            name_suffix=name_suffix or namespace,
        )
        if self.world_size != 1:
            raise ValueError(
                f"rollout.name={NAME} runs each replica in one process: set tensor, data and pipeline parallel sizes "
                f"to 1 (their product is {self.world_size})"
            )

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        from .rollout_worker import HFRolloutWorker

        worker = RayClassWithInitArgs(
            cls=ray.remote(HFRolloutWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )
        worker.update_options({"max_concurrency": self.max_concurrency})
        return worker

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        self.servers = [worker]
        host, port = await worker.launch_server.remote()
        self._server_handle = worker
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


RolloutReplicaRegistry.register(NAME, lambda: HFReplica)
