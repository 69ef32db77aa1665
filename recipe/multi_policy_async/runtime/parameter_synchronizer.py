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
"""Pushes one model's weights to that model's replicas only, and closes its gate meanwhile."""

import time
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass

from ..gateway_binding_registry import ModelState
from ..trajectory import Version
from .status import RuntimeStatusClient
from .version_tracker import VersionTracker


class WeightChecksumError(RuntimeError):
    """A replica serves other weights than the trainer sent."""


class ParameterSynchronizer(CheckpointEngineManager):
    """verl's ``CheckpointEngineManager`` for one model, with status, version and checksum around each sync.

    The sequence is verl's own (``checkpoint_engine/base.py:update_weights``): abort, build the group, send, load,
    resume. The servers stamp the version when the load is done and before they resume, so no answer can carry a
    version that did not sample it (invariant 5).

    Args:
        config: the model's full verl config.
        actor_wg: the trainer's worker group.
        replicas: this model's rollout replicas.
        status: where the gate's state is pushed.
        versions: the model's version tracker.
        incarnation: of the versions that this trainer makes.
        verify: compare checksums after every sync (needs an engine and replicas that report one).
    """

    def __init__(
        self,
        config: DictConfig,
        actor_wg: Any,
        replicas: Sequence[Any],
        *,
        status: RuntimeStatusClient,
        versions: VersionTracker,
        incarnation: int,
        verify: bool,
    ):
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        super().__init__(config=engine, actor_wg=actor_wg, replicas=list(replicas))
        self._status = status
        self._versions = versions
        self._incarnation = incarnation
        self._verify = verify

    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Sync and open the gate again; a failed sync leaves the gate closed and raises.

        Raises:
            WeightChecksumError: a replica's weights differ from the trainer's.
        """
        assert global_steps is not None, "a weight sync has a version"
        version = Version(self._incarnation, global_steps)
        started = time.monotonic()
        self._status.drain()
        drained = time.monotonic()
        self._status.push(ModelState.SYNCING, self._versions.get())
        metrics = dict(await super().update_weights(global_steps=global_steps) or {})
        if self._verify:
            await self._compare_checksums(metrics.pop("sync/checksum", None))
        self._versions.set(version)
        self._status.push(ModelState.OPEN, version)
        metrics["sync/drain_seconds"] = drained - started
        metrics["sync/seconds"] = time.monotonic() - drained
        return metrics

    async def _compare_checksums(self, sent: str | None) -> None:
        if sent is None:
            raise WeightChecksumError(f"checkpoint engine {self.backend!r} reports no checksum to verify against")
        for replica in self.replicas:
            for server in replica.servers:
                served = await server.checksum.remote()
                if served != sent:
                    raise WeightChecksumError(
                        f"replica {replica.replica_rank} serves {served}, the trainer sent {sent}"
                    )
