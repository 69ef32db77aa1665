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
"""The gateway that agents call: OpenAI-style HTTP in front of several models, one process of it or more.

    agent --/w/<token>/agents/<agent>/v1--> MultiModelGatewayRouter --AgentID -> ModelID--> that model's gate
                                                                       --ids--> that model's router or verl client
    workflow driver --/control/v1--> create, finalize, abort --WorkflowRecord--> sink (the ingestor)
    model runtimes --bind, set_status--> registry and gates

The class needs no Ray; ``launch.py`` makes an actor of it, ``IngestorSink`` is its way to the ingestor actor.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .agent_model_route_table import AgentModelRouteTable
from .gateway.app import AgentsFirst, create_app
from .gateway.closing import Sink
from .gateway.concurrency import adapt_limits
from .gateway.http_server import HttpServer
from .gateway.reaping import IdleReaper
from .gateway.service import GatewayService, make_upstream
from .gateway.spec import GatewaySpec
from .gateway_binding_registry import GatewayBindingRegistry, ModelBinding, ModelStatus
from .rewards import TeamShare
from .trajectory import WorkflowRecord

logger = logging.getLogger(__name__)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("adaptive concurrency has ended, limits stay as they are", exc_info=task.exception())


async def _nobody_tells() -> dict[str, bool]:
    return {}


class MultiModelGatewayRouter:
    """One gateway process.

    Args:
        spec: the ``gateway`` section, or its dict.
        agent_model_mapping: agent id -> model id.
        model_ids: the models of the job; each binds itself when its runtime is up.
        sink: takes the terminal record of every training workflow and answers accepted rows per model.
        hungry: which models' trainers have nothing to train, for adaptive concurrency.
        team_share: share of the team's score in each agent's reward.

    Raises:
        ValueError: the mapping names unknown models, or the spec is not valid.
    """

    def __init__(
        self,
        spec: GatewaySpec | Mapping[str, Any],
        agent_model_mapping: Mapping[str, str],
        model_ids: Sequence[str],
        sink: Sink,
        hungry: Callable[[], Awaitable[Mapping[str, bool]]] = _nobody_tells,
        *,
        team_share: TeamShare = 0.0,
    ) -> None:
        self.spec = spec if isinstance(spec, GatewaySpec) else GatewaySpec.model_validate(dict(spec))
        self.control_key = self.spec.control_key or secrets.token_urlsafe(32)
        routes = AgentModelRouteTable(agent_model_mapping, model_ids)
        registry = GatewayBindingRegistry(model_ids)
        self.service = GatewayService(self.spec, routes, registry, sink, make_upstream, team_share)
        self.app = create_app(self.service, self.control_key)
        self._server = HttpServer(
            AgentsFirst(self.app),
            self.spec.host,
            self.spec.port,
            max_head_bytes=self.spec.max_header_bytes,
            request_timeout_s=self.spec.request_timeout_s,
        )
        self.base_url: str | None = None
        self._hungry = hungry
        self._adapting: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen.

        Returns:
            The base URL, e.g. ``http://127.0.0.1:41237``.

        Raises:
            OSError: the port cannot be bound.
        """
        self.base_url = await self._server.start()
        service = self.service
        loop = adapt_limits(service.models, self._hungry, self.spec.adapt_every_s, service.metrics.in_flight_limit)
        self._adapting = asyncio.ensure_future(loop)
        self._adapting.add_done_callback(_log_failure)
        logger.info("gateway listens on %s", self.base_url)
        if self.spec.workflow_idle_s is not None:
            service = self.service
            reaper = IdleReaper(service.sessions, service.closer, service.metrics, idle_s=self.spec.workflow_idle_s)
            self._reaping = asyncio.create_task(reaper.run())
        return self.base_url

    async def bind(self, binding: ModelBinding) -> None:
        """Serve a model; see ``GatewayService.bind``."""
        await self.service.bind(binding)

    async def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Open or close a model's gate; see ``GatewayService.set_status``."""
        self.service.set_status(model_id, status)

    async def drain(self, model_id: str) -> int:
        """Close a model's gate before a sync and wait, up to ``drain_timeout_s``, for calls that could not be resumed.

        Optional: without it such calls start again, or end with a stream error.

        Returns:
            How many of them still run.

        Raises:
            ValueError: unknown model.
        """
        return await self.service.drain(model_id)

    async def stats(self) -> dict[str, Any]:
        """State, version, running and waiting attempts per model, and open workflows."""
        return self.service.stats()

    async def stop(self) -> None:
        """Abandon what runs, stop listening, release connections."""
        if self._adapting is not None:
            self._adapting.cancel()
        if self._reaping is not None:
            self._reaping.cancel()
        await self.service.close()
        await self._server.stop()


class IngestorSink:
    """Hands records to the TrajectoryIngestor actor."""

    def __init__(self, ingestor: Any) -> None:
        self._ingestor = ingestor

    async def __call__(self, record: WorkflowRecord) -> dict[str, int]:
        return await self._ingestor.ingest.remote(record)

    async def hungry(self) -> dict[str, bool]:
        """Policies whose queue is empty, or whose trainer waits for more than is in it. Frozen and retired ones are."""
        stats = await self._ingestor.stats.remote()
        return {
            model_id: not each["queue_groups"] or each["missing_groups"] > 0 or each["state"] in ("frozen", "retired")
            for model_id, each in stats.items()
        }
