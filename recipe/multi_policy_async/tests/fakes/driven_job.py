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
"""A workflow driver between a fake gateway and a real ingestor, and workflows that do as they are told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from recipe.multi_policy_async.tests.fakes.gateway_control import FakeGatewayControl, connection_error
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    ingest_spec,
    loop_time,
    queue_spec,
    workflow_stats,
)
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor
from recipe.multi_policy_async.workflow_driver import WorkflowDriver
from recipe.multi_policy_async.workflows.base import Task
from recipe.multi_policy_async.workflows.spec import ValidationSpec, WorkflowSpec

MODELS = {"planner": PLANNER, "solver": SOLVER}


class Tasks:
    def __init__(self, size: int):
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        return Task(index, {"prompt": [{"role": "user", "content": f"question {index}"}]})


class Shifted(Tasks):
    """Tasks whose numbers begin at ``first``, to tell them from those of an evaluation."""

    def __init__(self, first: int):
        super().__init__(4)
        self._first = first

    def __getitem__(self, index: int) -> Task:
        return super().__getitem__(self._first + index)


class Scripted:
    """Returns 1.0, or does what ``script`` says for a task's next episode: raise, sleep, return."""

    def __init__(self, script: dict[int, list[Any]] | None = None):
        self.script = script or {}
        self.running = self.most_running = 0

    async def run(self, task: Task, agents: Any) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
            act = self.script.get(task.index, [1.0])
            act = act.pop(0) if len(act) > 1 else act[0]
            if isinstance(act, BaseException):
                raise act
            return await act() if callable(act) else act
        finally:
            self.running -= 1


def workflow_spec(**changes: Any) -> WorkflowSpec:
    values = {
        "name": "scripted",
        "path": None,
        "kwargs": {},
        "n": 2,
        "timeout_s": 5.0,
        "max_concurrent": 8,
        "max_blocked_per_policy": 0,
        "blocked_after_s": 0.01,
        "max_attempts": 3,
        "retry_wait_s": 0.001,
        "max_failures_in_a_row": None,
        "max_outage_s": 60.0,
        "team_share": 0.0,
        "dump_every": 0,
    }
    return WorkflowSpec(**(values | changes))


def validation_spec(**changes: Any) -> ValidationSpec:
    values = {
        "every_updates": 0,
        "before_training": True,
        "at_end": False,
        "n": 1,
        "max_concurrent": 8,
        "pin": "none",
        "timeout_s": 10.0,
    }
    return ValidationSpec(**(values | changes))


class Reach:
    """Calls go through to ``target`` until it is dead to the caller."""

    def __init__(self, target: Any):
        self._target = target
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        async def reach(*args: Any) -> Any:
            if self.dead:
                raise ConnectionError("no ingestor")
            return await getattr(self._target, name)(*args)

        return reach


def _nobody(request: httpx.Request) -> httpx.Response:
    raise connection_error()


class Job:
    """Driver, fake gateway and real ingestor with both policies registered."""

    def __init__(
        self,
        path: Path,
        workflow: Any,
        *,
        tasks: int = 3,
        lead: int = 100,
        idle_tasks_limit: int | None = None,
        epochs: int = 1,
        validation: ValidationSpec | None = None,
        **changes: Any,
    ):
        self.ingestor = TrajectoryIngestor(path / "ledger.sqlite", ingest_spec(), clock=loop_time)
        self.reach_ingestor = Reach(self.ingestor)
        self.gateway = FakeGatewayControl(self.reach_ingestor.ingest, MODELS)
        self.queue = queue_spec(max_lead_groups=lead, idle_tasks_limit=idle_tasks_limit)
        self.driver = WorkflowDriver(
            workflow_spec(**changes),
            workflow,
            Tasks(tasks),
            self.gateway,
            self.reach_ingestor,
            eval_tasks=Tasks(4),
            validation=validation or validation_spec(),
            run_dir=path,
            shuffle=True,
            seed=7,
            epochs=epochs,
            poll_s=0.05,
            transport=httpx.MockTransport(_nobody),
        )

    async def open(self) -> None:
        for model_id in (PLANNER, SOLVER):
            await self.ingestor.register_policy(model_id, self.queue, True)

    def waits_for_training(self) -> bool:
        return self.driver._state == "waiting for training" and not self.driver._episodes

    async def endings(self) -> dict[str, int]:
        stats = workflow_stats(self.ingestor)
        assert stats["in_flight"] == 0, "invariant 4"
        return stats["endings"]


async def eventually(condition: Any) -> None:
    """Waits for a state instead of a time, so that a busy machine changes nothing."""
    while True:
        answer = condition()
        if await answer if asyncio.iscoroutine(answer) else answer:
            return
        await asyncio.sleep(0.002)


def play(job: Job, scenario: Any = None, run: Callable[..., Any] = asyncio.run) -> Any:
    """The driver's run, or a scenario. ``run``: ``virtual_time.run`` where nothing runs in threads."""

    async def main() -> Any:
        await job.open()
        try:
            if scenario is None:
                return await asyncio.wait_for(job.driver.run(), 20)
            return await asyncio.wait_for(scenario(), 20)
        finally:
            await job.ingestor.close()

    return run(main())
