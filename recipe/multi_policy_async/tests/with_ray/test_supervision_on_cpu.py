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
"""A trainer that hangs, and a part that dies, end the job with one line that names them (invariant 8)."""

import asyncio

import pytest

ray = pytest.importorskip("ray")

from ...configuration.schema import SupervisionSpec  # noqa: E402
from ...multi_model_metrics import PhaseReport, StepReport  # noqa: E402
from ...supervision import JobFailedError, PolicySupervisor, named  # noqa: E402

pytestmark = pytest.mark.slow  # imports Ray

SPEC = SupervisionSpec(startup_s=1, step_s=30, sync_s=10, save_s=20, shutdown_s=1, restarts=0)


class Remote:
    """A method under an actor's calling convention."""

    def __init__(self, function):
        self.remote = function


class FakeRuntime:
    """Hands out scripted reports, one list per call; then none."""

    def __init__(self, *batches, serving=None):
        self._batches = list(batches)
        self.next_reports = Remote(self._next)
        self.check_serving = Remote(serving or self._fine)

    async def _next(self, timeout_s):
        return self._batches.pop(0) if self._batches else []

    async def _fine(self):
        return None


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def phase(name: str) -> PhaseReport:
    return PhaseReport("solver_model", name, 4, 0.0)


def step() -> StepReport:
    return StepReport("solver_model", 5, 0.5, 0.0, 0, 8, 1.0, 0.5, 0.0)


def supervisor(runtime: FakeRuntime, clock: Clock | None = None) -> tuple[PolicySupervisor, list[StepReport]]:
    seen: list[StepReport] = []

    async def on_step(report):
        seen.append(report)

    watch = PolicySupervisor("solver_model", runtime, SPEC, on_step=on_step, on_saved=on_step, clock=clock or Clock())
    return watch, seen


@pytest.mark.parametrize(("name", "limit"), [("train", 30), ("sync", 10), ("save", 20)])
def test_a_trainer_that_stays_in_a_phase_beyond_its_deadline_fails_the_job(name, limit):
    clock = Clock()
    watch, _ = supervisor(FakeRuntime([phase(name)]), clock)
    asyncio.run(watch.pass_reports(0))
    clock.now = limit
    watch.check_phase()
    clock.now = limit + 1
    with pytest.raises(JobFailedError, match=f"solver_model: trainer: in phase '{name}' at version 4"):
        watch.check_phase()


def test_waiting_for_data_has_no_deadline():
    clock = Clock()
    watch, _ = supervisor(FakeRuntime([phase("wait")]), clock)
    asyncio.run(watch.pass_reports(0))
    clock.now = 1e6
    watch.check_phase()


def test_a_new_phase_has_a_deadline_of_its_own():
    clock = Clock()
    watch, _ = supervisor(FakeRuntime([phase("train")], [phase("sync")]), clock)
    asyncio.run(watch.pass_reports(0))
    clock.now = 25
    asyncio.run(watch.pass_reports(0))
    clock.now = 34
    watch.check_phase()


def test_every_step_is_passed_on_before_the_watch_ends():
    watch, seen = supervisor(FakeRuntime([phase("train"), step()], [step(), step(), phase("ended")]))
    asyncio.run(watch.watch_trainer())
    assert len(seen) == 3


def test_a_dead_actor_is_named_with_its_part():
    async def dies():
        raise ray.exceptions.ActorDiedError()

    with pytest.raises(JobFailedError, match="^ingestor: ActorDiedError"):
        asyncio.run(named(dies(), "ingestor"))


def test_an_error_inside_a_part_keeps_its_first_cause():
    async def fails():
        raise ray.exceptions.RayTaskError("fit", "traceback", ValueError("no such file"))

    with pytest.raises(JobFailedError, match="^planner_model: trainer: ValueError: no such file"):
        asyncio.run(named(fails(), "planner_model: trainer"))


def test_a_part_that_does_not_answer_is_named():
    async def hangs():
        await asyncio.Event().wait()

    with pytest.raises(JobFailedError, match="^ingestor: no answer within 0.01 s"):
        asyncio.run(named(hangs(), "ingestor", 0.01))
