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
"""One model's rollout side: replicas, the router process in front of them, and what the trainer asks about them."""

import asyncio
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig

from ..gateway.router_process import RouterProcess
from ..gateway.spec import GatewaySpec
from ..trajectory import Version
from .verl_adapter import FullyAsyncLLMServerClient, LLMServerManager

REPLICA_ANSWER_S = 60.0  # a busy server answers control calls late


class PolicyServerManager(LLMServerManager):
    """verl's ``LLMServerManager`` without the load-balancer actor where the router process does its work.

    The actor imports all of verl; one per model would cost seconds and half a gigabyte for nothing. Each model has its
    own range of replica ranks: verl names placement groups, server actors and sockets by the rank alone (C2, C3, C7,
    C8).
    """

    def __init__(
        self, config: DictConfig, *, start_rank: int, with_load_balancer: bool, replica_class: type | None = None
    ):
        if replica_class is not None:
            self.rollout_replica_class = replica_class
        self._with_load_balancer = with_load_balancer
        super().__init__(config=config, start_rank=start_rank)

    async def _init_global_load_balancer(self) -> None:
        if self._with_load_balancer:
            await super()._init_global_load_balancer()


def replica_class_for(config: DictConfig) -> type | None:
    """Our replica class for this rollout backend, ``None`` where verl's own is right."""
    name = config.actor_rollout_ref.rollout.name
    if name == "hf":
        from ..backends.cpu.replica import HFReplica

        return HFReplica
    if name == "sglang":
        from ..backends.sglang.replica import versioned_replica_class

        return versioned_replica_class()
    return None


class RolloutRuntime:
    """Launches and owns one model's replicas and router.

    Args:
        model_id: the model.
        config: its full verl config.
        start_rank: rank of its first replica.
        gateway: which upstream the gateway uses, and the router's settings.
        log_dir: where the router logs.
    """

    def __init__(self, model_id: str, config: DictConfig, start_rank: int, gateway: GatewaySpec, log_dir: Path):
        self.model_id = model_id
        self._start_rank = start_rank
        self._config = config
        self._gateway = gateway
        self._log_dir = log_dir
        self._servers: PolicyServerManager | None = None
        self._router: RouterProcess | None = None

    async def start(self) -> None:
        """Launch the replicas, then the router over them."""
        self._servers = await PolicyServerManager.create(
            self._config,
            start_rank=self._start_rank,
            with_load_balancer=self._gateway.upstream == "verl_client",
            replica_class=replica_class_for(self._config),
        )

    async def start_router(self) -> None:
        """Start the router process and wait until it answers for all replicas.

        Linux ends the router when the thread that started it ends, so this runs in a thread of the actor.
        """
        if self._gateway.upstream != "sglang_router":
            return
        self._router = RouterProcess(
            self.model_id,
            self.server_urls,
            self._gateway.router,
            self._log_dir / f"router-{self.model_id}.log",
            policy=self._gateway.router_policy,
            host=self._gateway.host,
        )
        self._router.start()
        await self._router.wait_ready()

    async def open_untrained(self, version: Version) -> None:
        """Let replicas of a model without a trainer serve the weights that they loaded at start."""
        servers = [server for replica in self.replicas for server in replica.servers]
        await asyncio.gather(*(server.set_global_steps.remote(version.number) for server in servers))
        await asyncio.gather(*(replica.resume_generation() for replica in self.replicas))

    @property
    def replicas(self) -> list[Any]:
        assert self._servers is not None, "the replicas are launched"
        return self._servers.get_replicas()

    @property
    def server_urls(self) -> list[str]:
        assert self._servers is not None, "the replicas are launched"
        return [f"http://{address}" for address in self._servers.get_addresses()]

    @property
    def router_url(self) -> str | None:
        return self._router.url if self._router else None

    @property
    def llm_server_client(self) -> Any | None:
        """verl's own client over this model's replicas, when the gateway uses it."""
        if self._gateway.upstream != "verl_client":
            return None
        assert self._servers is not None, "the replicas are launched"
        return self._servers.get_client(client_cls=FullyAsyncLLMServerClient)

    def check(self) -> None:
        """Raise if the router ended or a replica does not answer."""
        if self._router is not None:
            self._router.check_alive()
        servers = [server for replica in self.replicas for server in replica.servers]
        ray.get([server.get_server_address.remote() for server in servers], timeout=REPLICA_ANSWER_S)

    def stop(self) -> None:
        if self._router is not None:
            self._router.stop()
