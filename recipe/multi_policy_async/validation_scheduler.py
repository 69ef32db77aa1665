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
"""Decides when the whole team is evaluated, and tells what came of it.

    step reports --> due? --> pin versions (validation.pin) --> WorkflowDriver.evaluate --> console, files, trackers

An evaluation runs beside training, one at a time: what falls due meanwhile is one evaluation right after it. It is due
when some policy has made ``every_updates`` versions since the last one began, so no policy's weights are ever much more
than that away from measured ones, and a policy that is slow or has ended delays nobody's evaluation.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .ingest.handle import TargetDiedError, call
from .trajectory import Version
from .workflows.evaluation import EvaluationReport
from .workflows.failures import describe
from .workflows.spec import ValidationSpec

logger = logging.getLogger(__name__)

_PIN_MARGIN_S = 60.0  # for the driver to release what did not end in time


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. ``updates``: versions that all trained policies had made together when it began."""

    occasion: str  # "before training" | "updates" | "at the end"
    updates: int
    report: EvaluationReport


class ValidationScheduler:
    """Evaluates as configured. What goes wrong in an evaluation is told and never ends the training.

    Args:
        spec: when.
        driver: the workflow driver or its actor handle.
        ingestor: the trajectory ingestor or its actor handle.
        gateway: the gateway or its actor handle; it knows the versions that are served at the start.
        trained: ids of the policies in training.
        publish: takes every evaluation; called in a thread, since trackers write files and may import torch.
        note: takes a line for people when an evaluation failed.
    """

    def __init__(
        self,
        spec: ValidationSpec,
        driver: Any,
        ingestor: Any,
        gateway: Any,
        trained: list[str],
        *,
        publish: Callable[[Evaluation], None],
        note: Callable[[str], None],
    ):
        self._spec = spec
        self._driver = driver
        self._ingestor = ingestor
        self._gateway = gateway
        self._publish = publish
        self._note = note
        self._versions = dict.fromkeys(trained, 0)  # newest, by policy
        self._measured: dict[str, int] = {}  # those of the last evaluation's begin, or of the job's
        self._none_yet = True
        self._ended = False
        self._changed = asyncio.Event()

    def on_version(self, model_id: str, number: int) -> None:
        """A policy in training serves this version."""
        self._versions[model_id] = number
        self._measured[model_id] = min(number, self._measured.get(model_id, number))  # numbers go back at a restore
        self._changed.set()

    def training_ended(self, versions: Mapping[str, int]) -> None:
        """No version will follow; ``run`` ends with what is due now.

        Args:
            versions: final version by policy.
        """
        self._versions.update(versions)
        self._ended = True
        self._changed.set()

    async def run(self) -> None:
        """Evaluate whenever it is due, until the training has ended, or a part is gone."""
        if not self._spec.enabled:
            return
        try:
            await self._run()
        except TargetDiedError as error:
            logger.warning("no more evaluations: %s", error)  # supervision names the part and ends the job

    async def _run(self) -> None:
        served = (await call(self._gateway, "stats"))["models"]
        self._versions = {model_id: Version.parse(served[model_id]["version"]).number for model_id in self._versions}
        self._measured = dict(self._versions)
        if self._spec.before_training:
            await self._evaluate("before training")
        while True:
            self._changed.clear()
            if self._is_due():
                await self._evaluate("updates")
            elif self._ended:
                break
            else:
                await self._changed.wait()
        if self._spec.at_end and (self._none_yet or self._measured != self._versions):
            await self._evaluate("at the end")

    def _is_due(self) -> bool:
        every = self._spec.every_updates
        return every > 0 and any(now - self._measured[each] >= every for each, now in self._versions.items())

    async def _evaluate(self, occasion: str) -> None:
        pins = self._spec.pin == "hold_syncs"
        try:
            if pins:
                await self._pin()
            self._measured, self._none_yet = dict(self._versions), False
            report = await call(self._driver, "evaluate")
            if report.failed:
                logger.warning(
                    "%d of %d workflows failed; last: %s", report.failed, report.workflows, report.last_error
                )
            evaluation = Evaluation(occasion, sum(self._measured.values()), report)
            await asyncio.to_thread(self._publish, evaluation)
        except TargetDiedError:
            raise
        except Exception as error:
            # The user's dataset, a full disk, a tracker's server: all of it may fail, and none of it is worth the job.
            logger.warning("an evaluation failed", exc_info=True)
            self._note(f"validation ({occasion}) failed: {describe(error)}")
        finally:
            if pins:
                await call(self._ingestor, "unpin_versions")

    async def _pin(self) -> None:
        """Wait until no version is on its way; the report shows one that took too long."""
        wait_s = self._spec.timeout_s
        if not await call(self._ingestor, "pin_versions", 2 * wait_s + _PIN_MARGIN_S, wait_s):
            logger.warning("a version is being published for more than %g s: evaluating beside it", wait_s)
