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
"""One model = one fully async, disaggregated runtime: trainer, rollout side, weight sync, version and status.

The actor is one process per model. It holds the control state of that model only; the work is in the processes that it
owns: trainer ranks, rollout replicas, the router. When it dies they die with it, and no other model's do.

              BatchSource <- ingestor
                   |
    PolicyTrainer (trainer ranks) -> ParameterSynchronizer -> RolloutRuntime (replicas, router)
                                          |
                              VersionTracker, RuntimeStatusClient -> gateways
"""

import asyncio
import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from .checkpoint_coordinator import CheckpointSchedule, SavedCheckpoint
from .component import enter_component
from .configuration.schema import CheckpointSpec, PolicySpec
from .gateway.spec import GatewaySpec
from .gateway_binding_registry import ModelBinding, ModelState
from .multi_model_metrics import PhaseReport, StepReport
from .runtime.status import RuntimeStatusClient
from .runtime.version_tracker import VersionTracker
from .trajectory import Version

logger = logging.getLogger(__name__)

RETIRE_TIMEOUT_S = 120.0

Report = StepReport | PhaseReport | SavedCheckpoint


@dataclass(frozen=True)
class TrainingOutcome:
    """How one policy's training ended."""

    model_id: str
    version: int
    target_version: int | None

    @property
    def reached_target(self) -> bool:
        """Without a target version: anything was trained."""
        return self.version >= (1 if self.target_version is None else self.target_version)


class ModelAsyncRuntime:
    """A thin wrapper around one model's single-policy runtime of verl.

    Methods block and may be called from several threads (the actor has a few): ``fit`` runs for the whole job while
    ``next_reports`` and ``stop`` are served beside it.

    Args:
        policy: the model's resolved specification.
        gateway: the gateway's settings (which upstream, the router's).
        checkpoint: when to save.
        ingestor: handle of the ingestor actor.
        gateways: handles of the gateway actors.
        run_dir: the job's directory.
        poll_s: longest wait of one call to the ingestor, in seconds.
    """

    def __init__(
        self,
        policy: PolicySpec,
        gateway: GatewaySpec,
        checkpoint: CheckpointSpec,
        ingestor: Any,
        gateways: Sequence[Any],
        run_dir: Path,
        poll_s: float,
    ):
        enter_component(f"runtime-{policy.model_id}", run_dir)
        self.model_id = policy.model_id
        self.policy = policy
        self.config = policy.verl_config()
        self.checkpoints = CheckpointSchedule(checkpoint, run_dir, policy.model_id)
        self.ingestor = ingestor
        self.run_dir = run_dir
        self.poll_s = poll_s
        self.incarnation = 0
        self._reports: queue.Queue[Report] = queue.Queue()

        # verl is imported here and not above: the driver imports this module too and needs no torch.
        from .runtime.rollout_runtime import RolloutRuntime

        if self.config.trainer.device == "cpu":
            from .backends.cpu.plugin import check_platform

            check_platform()
        self.version_tracker = VersionTracker(self.model_id)
        self.status_client = RuntimeStatusClient(self.model_id, gateways)
        self.rollout_runtime = RolloutRuntime(
            self.model_id, self.config, policy.replica_rank_offset, gateway, run_dir / "logs"
        )
        self.training_queue = None
        self.trainer = None

    def launch(self, incarnation: int, restored: SavedCheckpoint | None = None) -> ModelBinding:
        """Start trainer ranks and replicas side by side; return what the gateway needs to reach the model.

        Args:
            incarnation: of the versions made and served from now on; it grows at every restore of this model.
            restored: the checkpoint it starts from; ``None``: the initial weights.
        """
        self.incarnation = incarnation
        self.version_tracker = VersionTracker(self.model_id, incarnation)
        self.config.actor_rollout_ref.rollout.custom.incarnation = incarnation

        async def start_trainer() -> None:
            await self.trainer.launch()
            if restored is not None:
                await self.trainer.restore(self.run_dir / restored.path)

        async def side_by_side() -> None:
            rollout = asyncio.to_thread(asyncio.run, self.rollout_runtime.start())
            if not self.policy.train:
                await rollout
            else:
                self.trainer = self._create_trainer()
                await asyncio.gather(rollout, asyncio.to_thread(asyncio.run, start_trainer()))
            await self.rollout_runtime.start_router()

        asyncio.run(side_by_side())
        return self._binding()

    def publish(self) -> None:
        """Serve the first version: the trainer's weights, or the loaded ones of a frozen model; open the gate."""
        if self.trainer is not None:
            asyncio.run(self.trainer.publish())
            return
        version = Version(self.incarnation, 0)
        asyncio.run(self.rollout_runtime.open_untrained(version))
        self.status_client.push(ModelState.OPEN, version)

    def fit(self) -> TrainingOutcome:
        """Train to the target or the end of the data; then retire and keep serving."""
        assert self.trainer is not None, "a frozen model has no trainer"
        asyncio.run(self.trainer.fit())
        ray.get(self.ingestor.retire.remote(self.model_id), timeout=RETIRE_TIMEOUT_S)
        self._report_phase("ended", self.trainer.current_param_version)
        return TrainingOutcome(self.model_id, self.trainer.current_param_version, self.policy.target_updates)

    def next_reports(self, timeout_s: float) -> list[Report]:
        """Reports since the last call; waits up to ``timeout_s`` seconds for the first."""
        try:
            reports = [self._reports.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            reports.append(self._reports.get_nowait())
        return reports

    def check_serving(self) -> None:
        """Raise if the router or a replica of this model is gone."""
        self.rollout_runtime.check()

    def stop(self) -> None:
        self.rollout_runtime.stop()

    def _create_trainer(self) -> Any:
        from verl.utils import hf_tokenizer

        from .ingest.batch_source import IngestBatchSource
        from .runtime.parameter_synchronizer import ParameterSynchronizer
        from .runtime.policy_trainer import PolicyTrainer
        from .runtime.tracking import PolicyTracking

        self.training_queue = IngestBatchSource(
            self.ingestor, self.model_id, groups=self._groups_per_batch(), poll_s=self.poll_s
        )
        tracking = PolicyTracking(self.model_id, self.config, self.run_dir, self.incarnation)
        self.config.trainer.logger = []  # upstream would open its own trackers without the prefix

        engine = self.config.actor_rollout_ref.rollout.checkpoint_engine
        verify = bool((engine.engine_kwargs.get(engine.backend) or {}).get("checksum", False))

        def make_synchronizer(actor_wg: Any) -> ParameterSynchronizer:
            return ParameterSynchronizer(
                self.config,
                actor_wg,
                self.rollout_runtime.replicas,
                status=self.status_client,
                versions=self.version_tracker,
                incarnation=self.incarnation,
                verify=verify,
            )

        return PolicyTrainer(
            model_id=self.model_id,
            config=self.config,
            tokenizer=hf_tokenizer(self.policy.model_path, trust_remote_code=self.config.data.trust_remote_code),
            namespace=self.policy.namespace,
            master_port_range=self.policy.master_port_range,
            source=self.training_queue,
            make_synchronizer=make_synchronizer,
            tracking=tracking,
            incarnation=self.incarnation,
            target_version=self.policy.target_updates,
            checkpoints=self.checkpoints,
            on_saved=self._reports.put,
            on_step=self._reports.put,
            on_phase=self._report_phase,
        )

    def _report_phase(self, phase: str, version: int) -> None:
        self._reports.put(PhaseReport(self.model_id, phase, version, time.time()))

    def _groups_per_batch(self) -> int:
        actor = self.config.actor_rollout_ref.actor
        return actor.ppo_mini_batch_size * self.config.async_training.require_batches

    def _binding(self) -> ModelBinding:
        rollout = self.config.actor_rollout_ref.rollout
        return ModelBinding(
            model_id=self.model_id,
            model_path=self.policy.model_path,
            exact_image_prompts=rollout.name == "hf",
            trained=self.policy.train,
            incarnation=self.incarnation,
            sampling={
                key: rollout.get(key)
                for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
                if rollout.get(key) is not None
            },
            # as verl's agent loop takes them (experimental/agent_loop/agent_loop.py, validate)
            eval_sampling={key: rollout.val_kwargs[key] for key in ("temperature", "top_p", "top_k")},
            max_prompt_length=rollout.prompt_length,
            max_response_length=rollout.response_length,
            max_model_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            router_url=self.rollout_runtime.router_url,
            replica_urls=self.rollout_runtime.server_urls,
            verl_client=self.rollout_runtime.llm_server_client,
            partial_rollout=self.config.async_training.partial_rollout,
            chat_template_kwargs=dict(self.config.data.get("apply_chat_template_kwargs") or {}),
            tool_parser=rollout.multi_turn.format,
            concurrency=self.policy.concurrency,
        )
