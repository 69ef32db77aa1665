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
"""A trainer that sleeps: verl's cycle of batches, versions and weight syncs, against the real queue and gate."""

import asyncio
from collections.abc import Callable

from ..gateway.service import GatewayService
from ..gateway_binding_registry import ModelState, ModelStatus
from ..ingest.batch_source import End, IngestBatchSource, ProducerDied, TakenBatch
from ..runtime.version_tracker import VersionTracker
from ..trajectory import Version
from ..trajectory_ingestor import TrajectoryIngestor
from .audit import Audit
from .engine import SimulatedEngine
from .meters import Phases, Samples, Window
from .scenario import SimulatedPolicySpec


class TrainerStopped(RuntimeError):
    """The producer died."""


class SimulatedTrainer:
    """Does what ``PolicyTrainer.fit`` and ``ParameterSynchronizer.update_weights`` do, in their order, without weights.

    Args:
        model_id: the policy.
        spec: its pace.
        ingestor: where batches come from, and where the policy retires.
        gateway: holds the policy's gate.
        engine: its servers.
        incarnation: of its versions.
        audit: is shown every batch.
        poll_s: longest wait of one call to the ingestor.
        window: what is measured.
        clock: simulated seconds.
    """

    def __init__(
        self,
        model_id: str,
        spec: SimulatedPolicySpec,
        ingestor: TrajectoryIngestor,
        gateway: GatewayService,
        engine: SimulatedEngine,
        incarnation: int,
        *,
        audit: Audit,
        poll_s: float,
        window: Window,
        clock: Callable[[], float],
    ):
        self.model_id = model_id
        self._training = spec.training
        self._ingestor = ingestor
        self._gateway = gateway
        self._engine = engine
        self._audit = audit
        self._window = window
        self._clock = clock
        self._source = IngestBatchSource(ingestor, model_id, groups=spec.training.batch_groups, poll_s=poll_s)
        self.versions = VersionTracker(model_id, incarnation)
        self._version = Version(incarnation, 0)
        self.phases = Phases(window, clock, "start")
        self.gate = Phases(window, clock, "closed")
        self.staleness = Samples()

    async def publish(self) -> None:
        """Wait for leave, close the gate, sync, stamp, open."""
        await self._source.flush()
        self.phases.enter("hold")
        await self._source.may_publish(self._version)
        self.phases.enter("sync")
        await self._gateway.drain(self.model_id)
        self.gate.enter("closed")
        self._gateway.set_status(self.model_id, ModelStatus(ModelState.SYNCING, self.versions.get()))
        await self._engine.sync(self._version, self._training.sync_s)
        self.versions.set(self._version)
        self._gateway.set_status(self.model_id, ModelStatus(ModelState.OPEN, self._version))
        self.gate.enter("open")
        await self._source.synced()

    async def fit(self) -> None:
        """Train until the data ends, close an open cycle as a version, retire.

        Raises:
            TrainerStopped: the producer died.
        """
        steps = 0
        while True:
            self.phases.enter("hold")
            await self._source.hold(self._version, self._training.trigger_parameter_sync_step - 1 - steps)
            self.phases.enter("wait")
            taken = await self._source.next_batch(self._version)
            if isinstance(taken, ProducerDied):
                raise TrainerStopped(f"{self.model_id}: {taken.cause}")
            if isinstance(taken, End):
                break
            await self._step(taken)
            steps += 1
            if steps == self._training.trigger_parameter_sync_step:
                steps = 0
                await self._next_version()
        if steps:
            await self._next_version()
        await self._source.flush()
        self.phases.enter("ended")
        await self._ingestor.retire(self.model_id)

    async def _step(self, batch: TakenBatch) -> None:
        self.phases.enter("train")
        rows = [row for group in batch.groups for row in group.trajectories]
        staleness = [self._version.number - row.version_span.oldest.number for row in rows]
        self._audit.taken(self.model_id, self._version, batch)
        if self._clock() in self._window:
            for value in staleness:
                self.staleness.add(value)
        await asyncio.sleep(self._training.step_s + len(rows) * self._training.row_s / self._training.ranks)
        self._source.mark_consumed(Version(self._version.incarnation, self._version.number + 1))

    async def _next_version(self) -> None:
        self._version = Version(self._version.incarnation, self._version.number + 1)
        await self.publish()
