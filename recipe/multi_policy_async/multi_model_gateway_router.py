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

The class needs no Ray; ``gateway_actor_class`` wraps it for a job, ``IngestorSink`` is its way to the ingestor actor.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from .agent_model_route_table import AgentModelRouteTable
from .gateway.app import create_app
from .gateway.closing import Sink
from .gateway.service import GatewayService, make_upstream
from .gateway.spec import GatewaySpec
from .gateway_binding_registry import GatewayBindingRegistry, ModelBinding, ModelStatus
from .trajectory import WorkflowRecord

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class MultiModelGatewayRouter:
    """One gateway process.

    Args:
        spec: the ``gateway`` section, or its dict.
        agent_model_mapping: agent id -> model id.
        model_ids: the models of the job; each binds itself when its runtime is up.
        sink: takes the terminal record of every training workflow and answers accepted rows per model.

    Raises:
        ValueError: the mapping names unknown models, or the spec is not valid.
    """

    def __init__(
        self,
        spec: GatewaySpec | Mapping[str, Any],
        agent_model_mapping: Mapping[str, str],
        model_ids: Sequence[str],
        sink: Sink,
    ) -> None:
        self.spec = spec if isinstance(spec, GatewaySpec) else GatewaySpec.model_validate(dict(spec))
        self.control_key = self.spec.control_key or secrets.token_urlsafe(32)
        routes = AgentModelRouteTable(agent_model_mapping, model_ids)
        registry = GatewayBindingRegistry(model_ids)
        self.service = GatewayService(self.spec, routes, registry, sink, make_upstream)
        self.app = create_app(self.service, self.control_key)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.base_url: str | None = None

    async def start(self) -> str:
        """Listen.

        Returns:
            The base URL, e.g. ``http://127.0.0.1:41237``.

        Raises:
            OSError: the port cannot be bound.
        """
        listener = _listen(self.spec.host, self.spec.port)
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            h11_max_incomplete_event_size=self.spec.max_header_bytes,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError(f"the gateway's server ended at its start on {host}:{port}")
            if asyncio.get_running_loop().time() > deadline:
                raise OSError(f"the gateway did not start within {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.005)
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("gateway listens on %s", self.base_url)
        return self.base_url

    async def get_control_key(self) -> str:
        """The bearer key of the control API, for whoever runs workflows."""
        return self.control_key

    async def bind(self, binding: ModelBinding) -> None:
        """Serve a model; see ``GatewayService.bind``."""
        await self.service.bind(binding)

    async def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Open or close a model's gate; see ``GatewayService.set_status``."""
        self.service.set_status(model_id, status)

    async def stats(self) -> dict[str, Any]:
        """State, version, running and waiting attempts per model, and open workflows."""
        return self.service.stats()

    async def stop(self) -> None:
        """Abandon what runs, stop listening, release connections."""
        await self.service.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            done, _ = await asyncio.wait([self._serving], timeout=_STOP_TIMEOUT_S)
            if not done:
                self._serving.cancel()
        self._server = self._serving = None


class _Server(uvicorn.Server):
    """uvicorn inside a process that has its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"the gateway cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class IngestorSink:
    """Hands records to the TrajectoryIngestor actor."""

    def __init__(self, ingestor: Any) -> None:
        self._ingestor = ingestor

    async def __call__(self, record: WorkflowRecord) -> dict[str, int]:
        return await self._ingestor.ingest.remote(record)


def gateway_actor_class(**actor_options: Any) -> Any:
    """``MultiModelGatewayRouter`` as a Ray actor class."""
    import ray

    return ray.remote(**({"num_cpus": 0} | actor_options))(MultiModelGatewayRouter)
