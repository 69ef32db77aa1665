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
"""Watches one policy: passes its reports on, and holds a deadline for every phase of its trainer.

A trainer is never pinged: it blocks in a step or a sync and would answer late. It pushes marks instead, and a mark that
is too old is a dead trainer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from .checkpoint_coordinator import SavedCheckpoint
from .configuration.schema import SupervisionSpec
from .ingest.handle import TargetDiedError
from .multi_model_metrics import PhaseReport, StepReport

ANSWER_S = 120.0  # a control call on a live actor takes milliseconds, also when the machine is busy
ENDED = "ended"
REPORTS_POLL_S = 5.0
SERVING_CHECK_EVERY_S = 5.0


class JobFailedError(RuntimeError):
    """A part of the job died or gave up; the message names it and the first cause."""


async def named(result: Awaitable[Any], part: str, timeout_s: float | None = None) -> Any:
    """Await a part's result; its failure names the part and the first cause.

    Raises:
        JobFailedError: the part failed, its process died, or it did not answer within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await result
    except TimeoutError:
        raise JobFailedError(f"{part}: no answer within {timeout_s:g} s") from None
    except (ray.exceptions.RayError, TargetDiedError) as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        raise JobFailedError(f"{part}: {type(cause).__name__}: {cause}") from error


def first_failure(group: BaseException) -> BaseException:
    """The first error of a group of groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class PolicySupervisor:
    """One policy's watch.

    Args:
        model_id: the policy.
        runtime: handle of its runtime actor.
        spec: the deadlines.
        on_step: takes every step's report.
        on_saved: takes every checkpoint.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model_id: str,
        runtime: Any,
        spec: SupervisionSpec,
        *,
        on_step: Callable[[StepReport], Awaitable[None]],
        on_saved: Callable[[SavedCheckpoint], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model_id = model_id
        self._runtime = runtime
        self._deadlines = {"train": spec.step_s, "sync": spec.sync_s, "save": spec.save_s}  # waiting has none
        self._serving_s = spec.sync_s
        self._on_step = on_step
        self._on_saved = on_saved
        self._clock = clock
        self._phase: PhaseReport | None = None
        self._since = 0.0

    async def watch_trainer(self) -> None:
        """Pass reports on until the training has ended.

        Raises:
            JobFailedError: the trainer stayed in a phase beyond its deadline, or its process died.
        """
        while self._phase is None or self._phase.phase != ENDED:
            await self.pass_reports(REPORTS_POLL_S)
            self.check_phase()

    async def watch_serving(self) -> None:
        """Ask for ever whether router and replicas are alive.

        Raises:
            JobFailedError: one is not, or does not answer.
        """
        while True:
            await asyncio.sleep(SERVING_CHECK_EVERY_S)
            await named(self._runtime.check_serving.remote(), f"{self.model_id}: serving", self._serving_s)

    async def pass_reports(self, timeout_s: float) -> None:
        """Pass on what was reported since the last call; wait up to ``timeout_s`` for something."""
        part = f"{self.model_id}: runtime"
        for report in await named(self._runtime.next_reports.remote(timeout_s), part):
            if isinstance(report, StepReport):
                await self._on_step(report)
            elif isinstance(report, SavedCheckpoint):
                await self._on_saved(report)
            else:
                self._phase, self._since = report, self._clock()

    def check_phase(self) -> None:
        """Raise JobFailedError if the trainer is in its phase for too long."""
        if self._phase is None or (limit := self._deadlines.get(self._phase.phase)) is None:
            return
        waited = self._clock() - self._since
        if waited > limit:
            raise JobFailedError(
                f"{self.model_id}: trainer: in phase {self._phase.phase!r} at version {self._phase.version} for "
                f"{waited:.0f} s (supervision allows {limit:g} s)"
            )
