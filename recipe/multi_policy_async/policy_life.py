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
"""One policy's life in a job: opened, watched, and started again while restarts are left. The others go on meanwhile.

    open: register with the ingestor -> launch -> bind to the gateway -> first weight sync: the gate opens
      ^                                                                      |
      |  kill what is left of it, let its requests wait,                   watch: trainer, its reports, serving
      '- leave it out of admission, take its newest checkpoint <- dead ------'

A restart gives a new incarnation: rows that only lost weights have seen wait again (ingest/ledger_checkpoints.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .checkpoint_coordinator import CheckpointCoordinator, SavedCheckpoint
from .configuration.schema import JobSpec
from .gateway_binding_registry import ModelBinding, ModelState, ModelStatus
from .gateway_group import GatewayGroup
from .model_async_runtime import TrainingOutcome
from .multi_model_metrics import StepReport
from .supervision import ANSWER_S, JobFailedError, PolicySupervisor, first_failure, named
from .trajectory import Version

logger = logging.getLogger(__name__)


class PolicyLife:
    """Owns one policy's runtime.

    Args:
        job: the job.
        model_id: the policy.
        ingestor: handle of the ingestor.
        gateways: all gateway processes.
        checkpoints: commits its saves and knows its newest one.
        new_runtime: creates its runtime actor.
        kill: kills a runtime.
        clear_away: frees what a killed runtime held.
        on_step: takes every step's report.
        note: prints a line.
    """

    def __init__(
        self,
        job: JobSpec,
        model_id: str,
        *,
        ingestor: Any,
        gateways: GatewayGroup,
        checkpoints: CheckpointCoordinator,
        new_runtime: Callable[[], Any],
        kill: Callable[[Any], None],
        clear_away: Callable[[], Awaitable[None]],
        on_step: Callable[[StepReport], Awaitable[None]],
        note: Callable[[str], None],
    ):
        self.model_id = model_id
        self.outcome: TrainingOutcome | None = None
        self.ended = asyncio.Event()  # its training is over; a restart may take that back
        self._job = job
        self._policy = job.models[model_id]
        self._agents = list(job.agent_model_mapping.values()).count(model_id)
        self._ingestor = ingestor
        self._gateways = gateways
        self._checkpoints = checkpoints
        self._new_runtime = new_runtime
        self._kill = kill
        self._clear_away = clear_away
        self._on_step = on_step
        self._note = note
        self._restarts_left = job.supervision.restarts
        self.runtime = new_runtime()

    async def open(self, restored: SavedCheckpoint | None) -> None:
        """Start from ``restored``, or from the initial weights; admission looks at it once its gate is open.

        Raises:
            JobFailedError: a step of it failed.
        """
        name = self.model_id
        register = self._ingestor.register_policy.remote(
            name,
            self._policy.queue,
            trained=self._policy.train,
            restored=restored and (restored.incarnation, restored.step),
            groups_per_task=float(self._agents),
        )
        incarnation = await named(register, f"{name}: ingestor")
        await named(self._ingestor.pause.remote(name, True), f"{name}: ingestor")
        await named(self._checkpoints.sweep(name), f"{name}: checkpoints")
        binding: ModelBinding = await named(self.runtime.launch.remote(incarnation, restored), f"{name}: launch")
        await self._gateways.bind(binding)
        await named(self.runtime.publish.remote(), f"{name}: first weight sync")
        await named(self._ingestor.pause.remote(name, False), f"{name}: ingestor")
        at = f" at version {restored.step}" if restored else ""
        self._note(f"{name} is open{at} ({len(binding.replica_urls)} replicas)")

    async def watch(self) -> None:
        """Train it and watch it until cancelled, with what restarts there are.

        Raises:
            JobFailedError: it died, and no restart is left.
        """
        failure: BaseException | None = None
        while True:
            try:
                if failure is not None:
                    await self._start_again(failure)
                await self._watch_once()
            except ExceptionGroup as failures:
                failure = first_failure(failures)
            except JobFailedError as error:
                failure = error
            if not isinstance(failure, JobFailedError) or self._restarts_left == 0:
                raise failure
            self._restarts_left -= 1

    async def _watch_once(self) -> None:
        supervisor = PolicySupervisor(
            self.model_id,
            self.runtime,
            self._job.supervision,
            on_step=self._on_step,
            on_saved=self._on_saved,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.watch_serving())
            if self._policy.train:
                training = group.create_task(named(self.runtime.fit.remote(), f"{self.model_id}: trainer"))
                reports = group.create_task(supervisor.watch_trainer())
                self.outcome = await training
                await reports
                self.ended.set()

    async def _on_saved(self, saved: SavedCheckpoint) -> None:
        await named(self._checkpoints.commit(saved), f"{self.model_id}: checkpoints")

    async def _start_again(self, failure: BaseException) -> None:
        name, left = self.model_id, self._restarts_left
        self.ended.clear()
        self._kill(self.runtime)  # first, so that it cannot say any more that it is open
        await self._gateways.set_status(name, ModelStatus(ModelState.STARTING, Version(0, 0)))
        await named(self._ingestor.pause.remote(name, True), f"{name}: ingestor", ANSWER_S)
        saved = await named(self._checkpoints.newest(name), f"{name}: checkpoints", ANSWER_S)
        start = f"version {saved.step}" if saved else "its initial weights"
        cause = str(failure).splitlines()[0].rstrip(".")  # Ray's errors are pages
        logger.warning("%s starts again: %s", name, failure)
        self._note(f"{cause}; {name} starts again from {start} ({left} restart{'' if left == 1 else 's'} left)")
        if saved is not None and (damage := await self._checkpoints.damage(saved)):
            raise JobFailedError(f"{name}: restart: {saved.path} {damage}")
        await self._clear_away()
        self.runtime = self._new_runtime()
        limit = self._job.supervision.startup_s
        try:
            async with asyncio.timeout(limit):
                await self.open(saved)
        except TimeoutError:
            raise JobFailedError(f"{name}: restart: not ready within {limit:g} s") from None
