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
"""The workflow driver as an actor: it builds its parts in its own process and starts when the gateways are there."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..workflow_driver import WorkflowDriver
from .dataset import load_tasks
from .loader import load_workflow_class
from .spec import WorkflowSpec


class WorkflowDriverActor:
    """Made by ``workflow_driver.as_actor``.

    Args:
        spec: which workflow, how many, deadlines.
        data: verl's ``data`` section.
        ingestor: handle of the ingestor actor.
        run_dir: the job's directory.
        seed: of the shuffling, where ``data.seed`` is not set.
        epochs: ``None``: until stopped.
        max_tasks: tasks of the whole run; ``None``: no limit.

    Raises:
        ValueError: the workflow class or the data cannot be loaded.
    """

    def __init__(
        self,
        spec: WorkflowSpec,
        data: Mapping[str, Any],
        ingestor: Any,
        *,
        run_dir: Path,
        seed: int,
        epochs: int | None = None,
        max_tasks: int | None = None,
    ):
        self._spec = spec
        self._ingestor = ingestor
        self._tasks = load_tasks(data)
        self._workflow = load_workflow_class(spec.name, spec.path)(**spec.kwargs)
        data_seed = data.get("seed")
        self._settings = {
            "run_dir": run_dir,
            "shuffle": bool(data.get("shuffle")),
            "seed": seed if data_seed is None else data_seed,
            "epochs": epochs,
            "max_tasks": max_tasks,
        }
        self._driver: WorkflowDriver | None = None

    async def connect(self, gateway_urls: Sequence[str], gateway_key: str) -> None:
        """Bind to the gateways, and import what the first workflow would wait for."""
        from ..gateway.client import GatewayControlClient

        await asyncio.to_thread(importlib.import_module, "openai")
        gateways = [GatewayControlClient(url, gateway_key) for url in gateway_urls]
        self._driver = WorkflowDriver(
            self._spec, self._workflow, self._tasks, gateways, self._ingestor, **self._settings
        )

    async def run(self) -> None:
        """See ``WorkflowDriver.run``."""
        await self._connected().run()

    async def drain(self) -> None:
        """See ``WorkflowDriver.drain``."""
        await self._connected().drain()

    async def stop(self) -> None:
        """See ``WorkflowDriver.stop``; before ``connect`` there is nothing to stop."""
        if self._driver is not None:
            await self._driver.stop()

    async def stats(self) -> dict[str, Any]:
        """See ``WorkflowDriver.stats``."""
        return await self._connected().stats()

    def _connected(self) -> WorkflowDriver:
        if self._driver is None:
            raise ValueError("the workflow driver is not connected to a gateway yet")
        return self._driver
