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
"""Launches, supervises and stops the parts of a job. It routes no request and runs no workflow.

    WorkflowDriver -> agents -> MultiModelGatewayRouter -> each model's replicas
          |                            |
          v                            v
    TrajectoryIngestor (ledger, one queue per model) -> one ModelAsyncRuntime per model -> new weights

Parts never import this module.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray

from .checkpoint_coordinator import CheckpointCoordinator, SavedCheckpoint
from .configuration.schema import JobSpec
from .gateway_group import GatewayGroup
from .launch import create_gateways, create_ingestor, create_runtime, create_workflow_driver
from .leftovers import clear_away
from .model_async_runtime import TrainingOutcome
from .multi_model_metrics import JobMetrics, StepReport
from .policy_life import PolicyLife
from .supervision import ANSWER_S, JobFailedError, first_failure, named
from .team_tracking import TeamTracking
from .validation_scheduler import Evaluation, ValidationScheduler

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


class MultiModelDisaggregateTrainer:
    """One co-training job.

    Args:
        job: the resolved specification.
        metrics: console and run directory.
        restore: the checkpoint that a policy starts from; of those not in it: the initial weights.
    """

    def __init__(self, job: JobSpec, metrics: JobMetrics, restore: Mapping[str, SavedCheckpoint | None]):
        self.job = job
        self.restore = restore
        self.metrics = metrics
        self.trained = list(job.trained)
        self.tracking = TeamTracking(job)
        self._drain = asyncio.Event()
        self.ingestor: Any = None
        self.workflow_driver: Any = None
        self.gateways: GatewayGroup | None = None
        self.policies: dict[str, PolicyLife] = {}

    async def init(self) -> None:
        """Create every part; models launch, are bound and open side by side, none waits for another."""
        self.ingestor = create_ingestor(self.job)
        self.checkpoints = CheckpointCoordinator(self.ingestor, self.job.run.dir, keep=self.job.checkpoint.keep)
        self.gateways = create_gateways(self.job, self.ingestor)
        self.policies = {model_id: self._policy(model_id) for model_id in self.job.models}
        self._not_started = ["gateway and workflow driver", *self.job.models]
        try:
            async with asyncio.timeout(self.job.supervision.startup_s):
                await asyncio.gather(self._start_serving(), *(self._open(model_id) for model_id in self.job.models))
        except TimeoutError:
            missing, seconds = ", ".join(self._not_started), self.job.supervision.startup_s
            raise JobFailedError(f"start-up: not ready within {seconds:g} s: {missing}") from None

    def _policy(self, model_id: str) -> PolicyLife:
        return PolicyLife(
            self.job,
            model_id,
            ingestor=self.ingestor,
            gateways=self.gateways,
            checkpoints=self.checkpoints,
            new_runtime=partial(create_runtime, self.job, model_id, self.ingestor, self.gateways.handles),
            kill=ray.kill,
            clear_away=partial(clear_away, self.job.models[model_id]),
            on_step=self._on_step,
            note=self.metrics.note,
        )

    async def _start_serving(self) -> None:
        await named(self.checkpoints.start(), "ingestor")
        urls = await self.gateways.start()
        self.workflow_driver = create_workflow_driver(self.job, self.ingestor, urls, self.gateways.control_key)
        await named(self.workflow_driver.stats.remote(), "workflow driver")
        self._not_started.remove("gateway and workflow driver")
        self.metrics.note(f"gateway listens on {', '.join(urls)}")

    async def _open(self, model_id: str) -> None:
        await self.policies[model_id].open(self.restore.get(model_id))
        self._not_started.remove(model_id)

    async def fit(self) -> dict[str, TrainingOutcome]:
        """Run until every trained model has ended; return how each did.

        Raises:
            JobFailedError: a part died.
        """
        try:
            async with asyncio.TaskGroup() as group:
                return await self._supervise(group)
        except ExceptionGroup as failures:
            raise first_failure(failures) from failures

    async def _supervise(self, group: asyncio.TaskGroup) -> dict[str, TrainingOutcome]:
        self.validation = self._make_validation()
        watches = [
            self._workflows(),
            self._pipeline_lines(),
            *(policy.watch() for policy in self.policies.values()),
            named(self.ingestor.wait_closed.remote(), "ingestor"),
            self.gateways.wait_closed(),
        ]
        background = [group.create_task(watch) for watch in watches]
        validating = group.create_task(self.validation.run())
        trained = [self.policies[model_id] for model_id in self.trained]
        while not all(policy.ended.is_set() for policy in trained):  # a restart takes an end back
            await asyncio.gather(*(policy.ended.wait() for policy in trained))
        outcomes = {policy.model_id: policy.outcome for policy in trained}
        self.validation.training_ended({model_id: outcome.version for model_id, outcome in outcomes.items()})
        drained = group.create_task(self._drain.wait())  # then a person wants the job to end
        await asyncio.wait({validating, drained}, return_when=asyncio.FIRST_COMPLETED)
        validating.cancel()
        drained.cancel()
        await named(self.workflow_driver.stop.remote(), "workflow driver", ANSWER_S)
        for task in background:
            task.cancel()
        return outcomes

    def _make_validation(self) -> ValidationScheduler:
        def publish(evaluation: Evaluation) -> None:
            self.metrics.validation(evaluation)
            self.tracking.log(evaluation)

        parts = (self.workflow_driver, self.ingestor, self.gateways)
        note = self.metrics.note
        return ValidationScheduler(self.job.validation, *parts, self.trained, publish=publish, note=note)

    async def _on_step(self, report: StepReport) -> None:
        self.validation.on_version(report.model_id, report.version)
        counts = await named(self.ingestor.stats.remote(), "ingestor", ANSWER_S)
        self.metrics.step(report, counts[report.model_id])

    async def close(self) -> None:
        """Stop what outlives its actor; the rest ends with the cluster connection."""
        self.tracking.finish()
        parts = [policy.runtime.stop.remote() for policy in self.policies.values()]
        parts += [self.gateways.stop()] if self.gateways is not None else []
        parts += [self.ingestor.close.remote()] if self.ingestor is not None else []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.job.supervision.shutdown_s):
                await asyncio.gather(*parts, return_exceptions=True)

    def drain(self) -> None:
        """Start no more workflows, finish the running ones, train what is queued, then end."""
        self._drain.set()

    async def _workflows(self) -> None:
        running = asyncio.ensure_future(named(self.workflow_driver.run.remote(), "workflow driver"))
        draining = asyncio.ensure_future(self._drain_when_asked())
        try:
            await running
        finally:
            draining.cancel()

    async def _drain_when_asked(self) -> None:
        timeout = self.job.stop.seconds if self.job.stop.by == "time" else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._drain.wait()
        self.metrics.note("draining: no new workflows, the running ones finish")
        await named(self.workflow_driver.drain.remote(), "workflow driver", ANSWER_S)

    async def _pipeline_lines(self) -> None:
        while True:
            await asyncio.sleep(self.job.metrics.pipeline_interval_s)
            workflows, queues, models = await asyncio.gather(
                named(self.workflow_driver.stats.remote(), "workflow driver", ANSWER_S),
                named(self.ingestor.stats.remote(), "ingestor", ANSWER_S),
                self.gateways.stats(),
            )
            self.metrics.pipeline(workflows, {m: queues[m] | models["models"][m] for m in self.job.models})


def run(job: JobSpec, restore: Mapping[str, SavedCheckpoint | None]) -> int:
    """Run a job on the connected Ray cluster, with policies that start from the checkpoints in ``restore``.

    Returns:
        The process's exit code: 0 only when every trained model reached what ``stop.by`` asks (invariant 8).
    """
    metrics = JobMetrics(job.run.dir, list(job.models))
    return asyncio.run(_run(MultiModelDisaggregateTrainer(job, metrics, restore), metrics))


async def _run(trainer: MultiModelDisaggregateTrainer, metrics: JobMetrics) -> int:
    interrupts = _Interrupts(trainer, asyncio.current_task())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupts)
    try:
        await trainer.init()
        interrupts.can_drain = True
        outcomes = await trainer.fit()
    except JobFailedError as failure:
        metrics.note(f"FAILED: {failure}")
        return EXIT_FAILED
    except asyncio.CancelledError:
        metrics.note("ended by signal")
        return EXIT_INTERRUPTED
    except Exception as error:  # a defect of ours; the job still ends as one that failed
        logger.exception("the orchestrator failed")
        metrics.note(f"FAILED: orchestrator: {type(error).__name__}: {error}")
        return EXIT_FAILED
    finally:
        interrupts.ending = True
        await trainer.close()
    for outcome in outcomes.values():
        aim = "" if outcome.target_version is None else f" of {outcome.target_version}"
        metrics.note(f"{outcome.model_id} ended at version {outcome.version}{aim}")
    if interrupts.count:
        return EXIT_INTERRUPTED
    return 0 if outcomes and all(outcome.reached_target for outcome in outcomes.values()) else EXIT_FAILED


class _Interrupts:
    """First signal drains, second ends; before training begins the first one ends. Ending is not interrupted."""

    def __init__(self, trainer: MultiModelDisaggregateTrainer, main: asyncio.Task):
        self.count = 0
        self.can_drain = False
        self.ending = False
        self._trainer = trainer
        self._main = main

    def __call__(self) -> None:
        self.count += 1
        if self.can_drain and self.count == 1:
            self._trainer.drain()
        elif not self.ending:
            self.ending = True
            self._main.cancel()
