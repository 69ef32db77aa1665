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
"""Wires one simulated job: every part is the real one but the engines, the trainers and the workflow.

WorkflowDriver -> openai client -> ASGI -> gateway sessions, gates -> SimulatedEngine
      |                                         |
      '-- admission -- TrajectoryIngestor <-----'   ledger, queues, staleness, holding, schedules
                              '--> IngestBatchSource -> SimulatedTrainer -> gate: DRAINING, SYNCING, OPEN
"""

import asyncio
import itertools
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import httpx

from ..agent_model_route_table import AgentModelRouteTable
from ..clock import now
from ..gateway.app import create_app
from ..gateway.client import GatewayControlClient
from ..gateway.service import GatewayService
from ..gateway_binding_registry import GatewayBindingRegistry, ModelBinding, ModelState, ModelStatus
from ..trajectory import Version, WorkflowRecord
from ..trajectory_ingestor import TrajectoryIngestor
from ..workflow_driver import WorkflowDriver
from . import virtual_time
from .alphabet import write_model_folder
from .audit import Audit
from .engine import SimulatedEngine
from .measured import Run, measure_policy
from .meters import Level, Samples, Window
from .scenario import Scenario
from .trainer import SimulatedTrainer
from .workflow import SimulatedWorkflow, simulated_tasks

_URL = "http://gateway.simulated"
_KEY = "simulated"
_MANY_TOKENS = 1 << 20


class SimulationStalled(RuntimeError):
    """No workflow finished and no trainer worked for ``stall_s``: the parts wait for each other."""


class WatchedIngestor(TrajectoryIngestor):
    """The real one, with its records shown to the audit and the waits of admission measured."""

    def __init__(self, path: Path, scenario: Scenario, audit: Audit, window: Window):
        super().__init__(path, scenario.ingest, clock=now)
        self._audit = audit
        self.admission_waits = Level(window, now)

    async def admit(self, *args: Any) -> bool:
        with self.admission_waits.one():
            return await super().admit(*args)

    async def ingest(self, record: WorkflowRecord) -> dict[str, int]:
        answer = await super().ingest(record)
        self._audit.ended(record)
        return answer


def simulate(scenario: Scenario) -> Run:
    """Run a scenario in virtual time.

    Raises:
        SimulationStalled: the parts wait for each other.
        DriverError: the workflow driver gave up.
    """
    with tempfile.TemporaryDirectory(prefix="simulate-") as folder:
        try:
            return virtual_time.run(_simulate(scenario, Path(folder)))
        except ExceptionGroup as group:
            raise _first(group) from group


async def _simulate(scenario: Scenario, folder: Path) -> Run:
    spec = scenario.simulation
    window = Window(spec.warmup_s, spec.seconds)
    engines = {
        name: SimulatedEngine(policy.serving, f"{spec.seed}/{name}", window, now)
        for name, policy in scenario.policies.items()
    }
    audit = Audit(engines, {name: policy.queue for name, policy in scenario.policies.items()})
    ledger = folder / "ledger.sqlite"
    ingestor = WatchedIngestor(ledger, scenario, audit, window)
    gateway = GatewayService(
        scenario.gateway,
        AgentModelRouteTable({name: name for name in engines}, engines),
        GatewayBindingRegistry(engines),
        ingestor.ingest,
        lambda _, binding: engines[binding.model_id],
        scenario.workflow.team_share,
    )
    transport = httpx.ASGITransport(create_app(gateway, _KEY))
    control = GatewayControlClient(_URL, _KEY, transport=transport)
    driver = WorkflowDriver(
        scenario.workflow,
        SimulatedWorkflow(scenario),
        simulated_tasks(spec.tasks),
        control,
        ingestor,
        shuffle=False,
        seed=spec.seed,
        poll_s=scenario.ingest.poll_s,
        transport=transport,
    )
    try:
        trainers = await _open(scenario, write_model_folder(folder), ingestor, gateway, engines, audit, window)
        return await _play(scenario, window, ledger, driver, ingestor, engines, trainers, audit)
    finally:
        await driver.stop()
        await control.close()
        await gateway.close()
        await ingestor.close()


async def _open(
    scenario: Scenario,
    model_folder: Path,
    ingestor: TrajectoryIngestor,
    gateway: GatewayService,
    engines: Mapping[str, SimulatedEngine],
    audit: Audit,
    window: Window,
) -> dict[str, SimulatedTrainer]:
    """Register, bind and open every policy, as ``MultiModelDisaggregateTrainer`` does."""
    trainers = {}
    for name, policy in scenario.policies.items():
        incarnation = await ingestor.register_policy(name, policy.queue, policy.train, None, 1.0)
        await gateway.bind(_binding(name, model_folder, policy.train, incarnation))
        if policy.train:
            trainers[name] = SimulatedTrainer(
                name,
                policy,
                ingestor,
                gateway,
                engines[name],
                incarnation,
                audit=audit,
                poll_s=scenario.ingest.poll_s,
                window=window,
                clock=now,
            )
        else:
            await engines[name].sync(Version(incarnation, 0), 0)
            gateway.set_status(name, ModelStatus(ModelState.OPEN, Version(incarnation, 0)))
    await asyncio.gather(*(trainer.publish() for trainer in trainers.values()))
    return trainers


def _binding(name: str, folder: Path, trained: bool, incarnation: int) -> ModelBinding:
    return ModelBinding(
        model_id=name,
        model_path=str(folder),
        trained=trained,
        incarnation=incarnation,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        max_prompt_length=_MANY_TOKENS,
        max_response_length=_MANY_TOKENS,
        max_model_len=2 * _MANY_TOKENS,
    )


async def _play(
    scenario: Scenario,
    window: Window,
    ledger: Path,
    driver: WorkflowDriver,
    ingestor: WatchedIngestor,
    engines: Mapping[str, SimulatedEngine],
    trainers: Mapping[str, SimulatedTrainer],
    audit: Audit,
) -> Run:
    watch = _Watch(scenario, window, driver, ingestor, trainers.values())
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        ends = [group.create_task(trainer.fit()) for trainer in trainers.values()]
        ends.append(group.create_task(driver.run()))
        await asyncio.sleep(scenario.simulation.seconds - now())
        await driver.drain()
        await asyncio.wait(ends)
        watching.cancel()
    stats = await ingestor.stats()
    waiting = {name: numbers["open"] + numbers["queued"] + numbers["taken"] for name, numbers in stats.items()}
    fates = audit.settle(ledger, waiting)
    faults = [*audit.faults, *watch.faults]
    return Run(
        scenario=scenario,
        seconds=window.seconds,
        policies={
            name: measure_policy(
                engine, trainers.get(name), watch.begin[name], watch.end[name], watch.queue_groups[name]
            )
            for name, engine in engines.items()
        },
        workflow_rate=watch.workflows / window.seconds,
        slots=scenario.workflow.max_concurrent,
        slots_in_use=watch.running.mean,
        admission=scenario.ingest.admission,
        admission_share=ingestor.admission_waits.mean,
        ended_at=now(),
        fates=fates,
        rows=audit.rows,
        faults=tuple(faults),
    )


class _Watch:
    """Reads the parts' own numbers every second, and notices when nothing happens any more."""

    def __init__(
        self,
        scenario: Scenario,
        window: Window,
        driver: WorkflowDriver,
        ingestor: TrajectoryIngestor,
        trainers: Collection[SimulatedTrainer],
    ):
        self._stall_s = scenario.simulation.stall_s
        self._window = window
        self._driver = driver
        self._ingestor = ingestor
        self._trainers = trainers
        self.running = Samples()
        self.queue_groups = {name: Samples() for name in scenario.policies}
        self.begin: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.workflows = 0
        self.faults: list[str] = []

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            SimulationStalled: nothing happens any more.
        """
        done, since = -1, now()
        begun_at: int | None = None
        for second in itertools.count():
            await asyncio.sleep(second - now())
            workflows, queues = await self._driver.stats(), await self._ingestor.stats()
            finished = workflows["finished"] + workflows["failed"]
            if self._window.begin <= second <= self._window.end:
                if begun_at is None:
                    begun_at, self.begin = finished, queues
                self.end, self.workflows = queues, finished - begun_at
                self.running.add(workflows["running"])
                for name, numbers in queues.items():
                    self.queue_groups[name].add(numbers["queue_groups"])
            self.faults += [
                f"{name}: {numbers['unaccounted']} rows unaccounted for at {now():.0f} s"
                for name, numbers in queues.items()
                if numbers["unaccounted"]
            ]
            progress = finished + sum(numbers["trained"] for numbers in queues.values())
            if progress != done:
                done, since = progress, now()
            elif any(trainer.phases.now in ("train", "sync") for trainer in self._trainers):
                since = now()
            elif now() - since > self._stall_s:
                leads = ", ".join(
                    f"{name} {numbers['lead_groups']:.1f} of {numbers['max_lead_groups']}"
                    for name, numbers in queues.items()
                )
                raise SimulationStalled(
                    f"nothing ended for {self._stall_s:g} s at {now():.0f} s: driver {workflows['state']}, "
                    f"{workflows['running']} workflows running; groups in lead: {leads}"
                )


def _first(group: BaseExceptionGroup) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
