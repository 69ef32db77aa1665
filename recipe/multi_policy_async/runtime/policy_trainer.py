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
"""verl's ``FullyAsyncTrainer`` for one policy among several: other input, exact denominators, whole cycles.

Every override below names what upstream does there; a test pins a hash of each upstream method, so that a change in
verl is seen before it is trained on.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm
from verl import DataProto

from ..checkpoint_coordinator import CheckpointSchedule, SavedCheckpoint
from ..configuration.training_checks import ESTIMATORS
from ..ingest.batch_source import BatchSource, End, ProducerDied
from ..multi_model_metrics import StepReport
from ..trajectory import Version
from .batch_assembly import AssembledBatch, assemble, divides_by_std
from .estimator_check import check_estimator
from .image_inputs import ImageInputs
from .parameter_synchronizer import ParameterSynchronizer
from .tracking import PolicyTracking
from .upstream_ports import QueueSizePort, RollouterPort, UpdateGroup
from .verl_adapter import (
    TrainingStopException,
    trainer_base_class,
    trainer_resources,
    worker_classes,
    worker_group_class,
)

logger = logging.getLogger(__name__)

MAX_NON_FINITE_IN_A_ROW = 3


class ProducerDiedError(RuntimeError):
    """The process that fills this policy's queue is gone; more data will not come."""


class NonFiniteStepError(RuntimeError):
    """A step's loss or gradient norm is not finite: its version must not be published."""


class PolicyTrainer(trainer_base_class()):
    """Trains one policy from a ``BatchSource`` until its target version.

    Args:
        model_id: the policy.
        config: its full verl config.
        tokenizer: its tokenizer.
        namespace: prefix of every cluster-wide name (collision C1).
        master_port_range: rendezvous ports of its ranks (collision C11).
        source: where whole advantage groups come from.
        make_synchronizer: builds the weight synchronizer once the worker group exists.
        tracking: prefixed metrics.
        incarnation: of the versions that this trainer makes.
        target_version: the trainer retires there; ``None`` trains until the data ends.
        checkpoints: when to save, and where.
        on_saved: called when a checkpoint's files are on disk.
        on_step: called with a report after every training step.
        on_phase: called with ``(phase, version)`` when a phase begins; the supervisor holds a deadline per phase.
    """

    def __init__(
        self,
        *,
        model_id: str,
        config: DictConfig,
        tokenizer: Any,
        namespace: str,
        master_port_range: tuple[int, int],
        source: BatchSource,
        make_synchronizer: Callable[[Any], ParameterSynchronizer],
        tracking: PolicyTracking,
        incarnation: int,
        target_version: int | None,
        checkpoints: CheckpointSchedule,
        on_saved: Callable[[SavedCheckpoint], None],
        on_step: Callable[[StepReport], None],
        on_phase: Callable[[str, int], None],
    ):
        if config.algorithm.adv_estimator not in ESTIMATORS:
            check_estimator(config.algorithm.adv_estimator, config.algorithm)
        super().__init__(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=worker_classes(config),
            resource_pool_manager=trainer_resources(config, namespace),
            ray_worker_group_cls=worker_group_class(master_port_range),
            device_name=config.trainer.device,
        )
        self.model_id = model_id
        self.incarnation = incarnation
        self.target_version = target_version
        self.message_queue_client = QueueSizePort()
        self.logger = tracking
        self.progress_bar = tqdm(disable=True)
        self._source = source
        self._make_synchronizer = make_synchronizer
        self._checkpoints = checkpoints
        self._on_saved = on_saved
        self._on_step = on_step
        self._on_phase = on_phase
        self._images = ImageInputs.load(config.actor_rollout_ref.model.path)
        self._batch: AssembledBatch | None = None
        self._version_timing: dict | None = None
        self._non_finite_in_a_row = 0
        self._step_started = time.monotonic()

    async def launch(self) -> None:
        """Build the worker group and the models."""
        await self.init_workers()
        self.actor_rollout_wg = UpdateGroup(self.actor_wg)
        if self.use_critic:
            self.critic_wg = UpdateGroup(self.critic_wg)

    async def restore(self, folder: Path) -> None:
        """Go on from a checkpoint of verl's, whose folder's name tells the version.

        Upstream sets the number of steps one too high: its ``fit`` counts the first one again.
        """
        self.config.trainer.resume_mode = "resume_path"
        self.config.trainer.resume_from_path = str(folder)
        await self.load_checkpoint()
        self.global_steps = self.current_param_version * self.trigger_parameter_sync_step

    async def publish(self) -> None:
        """Send the current weights to the replicas as the current version."""
        await self.set_rollouter(RollouterPort())
        await self._fit_update_weights()

    async def _setup_checkpoint_manager(self) -> None:
        """Upstream builds a ``CheckpointEngineManager`` over the rollouter's replicas; ours also gates and stamps."""
        self.checkpoint_manager = self._make_synchronizer(self.actor_wg)

    async def fit(self) -> None:
        """Train until the target version or the end of the data; then close an open cycle as a version and save.

        Upstream returns early in mid-cycle, which would lose micro-steps that were trained.

        Raises:
            ProducerDiedError: the data ended because its producer died.
            NonFiniteStepError: several steps in a row were not finite.
        """
        self.max_steps_duration = 0
        self.global_steps += 1
        while self.target_version is None or self.current_param_version < self.target_version:
            try:
                await self.fit_step()
            except TrainingStopException:
                break
            except NonFiniteStepError as error:
                self._abandon_step(error)
        if self.local_trigger_step > 1:
            self.local_trigger_step = 1
            self.current_param_version += 1
            super()._fit_log_aggregated_training_metrics(await self._fit_update_weights())
        self._fit_save_checkpoint(force=True)
        await self._source.flush()
        self.logger.finish()

    async def _get_samples_from_queue(self):
        """Upstream takes a fixed number of samples, throws a partial batch away and unpacks ``None``. Ours takes whole
        groups, and with ``on_stale: hold`` it waits first for those that the next version would make stale."""
        started = time.monotonic()
        version = Version(self.incarnation, self.current_param_version)
        self._on_phase("hold", self.current_param_version)
        await self._source.hold(version, self.trigger_parameter_sync_step - self.local_trigger_step)
        self._on_phase("wait", self.current_param_version)
        taken = await self._source.next_batch(version)
        if isinstance(taken, ProducerDied):
            raise ProducerDiedError(f"{self.model_id}: {taken.cause}")
        if isinstance(taken, End):
            return None, None
        self._on_phase("train", self.current_param_version)
        self.message_queue_client.groups = taken.queue_groups
        self._step_started = time.monotonic()
        self._batch = assemble(
            taken,
            dp_size=self._get_dp_size(self.actor_wg, "actor"),
            wanted_updates=self.require_batches,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            version=self.current_param_version,
            by_std=divides_by_std(self.config.algorithm),
            images=self._images,
        )
        for group in (self.actor_rollout_wg, self.critic_wg if self.use_critic else None):
            if group is not None:
                group.batch = self._batch
        self._batch.data.meta_info["fully_async/total_wait_time"] = time.monotonic() - started
        return 0, self._batch.data

    def _fit_update_local_step(self) -> None:
        """Upstream counts the step; before that, ours proves it finite and marks its rows consumed."""
        bad = {key: value for key, value in self.metrics.items() if _is_loss(key) and not math.isfinite(value)}
        if bad:
            raise NonFiniteStepError(f"{self.model_id} at version {self.current_param_version}: {bad}")
        self._non_finite_in_a_row = 0
        self._source.mark_consumed(Version(self.incarnation, self.current_param_version + 1))
        super()._fit_update_local_step()

    async def _fit_update_weights(self) -> dict | None:
        """Upstream publishes at the end of a cycle; before that, ours makes sure that the ledger knows what the weights
        have seen (invariant 2), and waits where the ingestor asks for it (``stagger``, an evaluation's pin)."""
        publishes = self.local_trigger_step == 1
        if publishes:
            self._on_phase("hold", self.current_param_version)
            await self._source.flush()
            await self._source.may_publish(Version(self.incarnation, self.current_param_version))
            self._on_phase("sync", self.current_param_version)
        timing = await super()._fit_update_weights()
        if publishes:
            await self._source.synced()
        return timing

    def _abandon_step(self, error: NonFiniteStepError) -> None:
        self._source.drop("non_finite")
        self._non_finite_in_a_row += 1
        logger.warning("dropped a step: %s", error)
        if self._non_finite_in_a_row >= MAX_NON_FINITE_IN_A_ROW:
            raise error

    def _fit_save_checkpoint(self, force: bool = False) -> None:
        """Upstream saves by its own frequency, also in mid-cycle; ours only at a version boundary, by the job's.

        Args:
            force: training has ended.
        """
        version = Version(self.incarnation, self.current_param_version)
        at_boundary = self.local_trigger_step == 1 and self.current_param_version != self.last_ckpt_version
        if not at_boundary or not self._checkpoints.is_due(version, last=force):
            return
        self._on_phase("save", self.current_param_version)
        self.config.trainer.default_local_dir = str(self._checkpoints.folder(self.incarnation))
        self._save_checkpoint()
        self.last_ckpt_version = self.current_param_version
        self._on_saved(self._checkpoints.describe(version))

    def _fit_collect_metrics(self, batch: DataProto) -> None:
        """Upstream measures lengths and tokens of all rows; ours leaves out padding."""
        real = batch.select_idxs(batch.non_tensor_batch["trajectory_id"] != "")
        tokens = real.batch["attention_mask"].sum(-1).tolist()
        real.meta_info = {**batch.meta_info, "global_token_num": tokens}
        super()._fit_collect_metrics(real)

    def _fit_log_aggregated_training_metrics(self, rollout_reset_timing_raw: dict) -> None:
        """Upstream logs a version before its last step's metrics are added, and the last version never."""
        self._version_timing = rollout_reset_timing_raw

    def _fit_postprocess_step(self) -> None:
        """Upstream adds the step's metrics; ours then logs the version that it completed, and reports the step."""
        super()._fit_postprocess_step()
        if self._version_timing is not None:
            super()._fit_log_aggregated_training_metrics(self._version_timing)
            self._version_timing = None
        assert self._batch is not None, "a step was trained"
        meta = self._batch.data.meta_info
        self._on_step(
            StepReport(
                model_id=self.model_id,
                version=self.current_param_version,
                reward=meta["fully_async/batch/reward_mean"],
                staleness_mean=meta["fully_async/staleness/mean"],
                staleness_max=meta["fully_async/staleness/max"],
                rows=self._batch.real_rows,
                step_seconds=self.timing_raw["step"],
                train_seconds=time.monotonic() - self._step_started,
                time=time.time(),
                incarnation=self.incarnation,
            )
        )


def _is_loss(key: str) -> bool:
    return key.rsplit("/", 1)[-1] in ("loss", "pg_loss", "vf_loss", "kl_loss", "grad_norm", "entropy_loss")
