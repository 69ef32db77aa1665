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
"""The phases of a run: many open workflows; router, relay and gateway in turn, so many at once or per second."""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from recipe.multi_policy_async.gateway.client import AgentEndpoints, GatewayControlClient
from recipe.multi_policy_async.tests.fakes.gateway_process import read_records

from .load import Client, Outcome, Request, at_once, per_second
from .meter import Meter
from .traffic import CALLS, Traffic, Workflow

SIDES = ("router", "relay", "gateway")
SOAK_CONCURRENCY = 64

Load = Callable[[list[Request]], Awaitable[Outcome]]


class Bench:
    """All ways to the engines, and what was sent through them so far.

    Args:
        traffic: requests and answers.
        engines: URL of each model's engine.
        direct: URL of each model's router, and of the relay's route to it, by side.
        control: of all gateway processes.
        meter: CPU time and memory of everything that listens.
    """

    def __init__(
        self,
        traffic: Traffic,
        engines: dict[str, str],
        direct: dict[str, dict[str, str]],
        control: GatewayControlClient,
        meter: Meter,
    ) -> None:
        self.traffic = traffic
        self.direct = direct
        self.control = control
        self.meter = meter
        self.client = Client()
        self.first: dict[str, int] = {}  # workflow id -> place in CALLS of its first call
        self.next: dict[str, int] = {}  # workflow id -> place in CALLS of its next call
        self.sent = 0  # requests that engines must have got
        self._engines = engines
        self._numbers = itertools.count()

    async def open(self, first: int = 0) -> tuple[Workflow, dict[str, AgentEndpoints]]:
        """A new workflow at a gateway."""
        workflow = Workflow(next(self._numbers))
        self.first[workflow.workflow_id] = self.next[workflow.workflow_id] = first
        return workflow, await self.control.create_workflow(workflow.workflow_id)

    async def finalize(self, workflow: Workflow) -> None:
        await self.control.finalize(workflow.workflow_id, rewards=1.0)

    def next_call(self, workflow: Workflow, endpoints: dict[str, AgentEndpoints]) -> Request:
        agent, turn = CALLS[self.next[workflow.workflow_id]]
        self.next[workflow.workflow_id] += 1
        self.sent += 1
        return self.traffic.to_gateway(workflow, endpoints, agent, turn)

    def over(self, workflow: Workflow) -> bool:
        return self.next[workflow.workflow_id] == len(CALLS)

    async def measure(self, side: str, count: int, load: Load) -> dict[str, Any]:
        """One phase at one side, over fresh workflows, turn after turn; opening and ending them is not measured."""
        rounds, opened = range(len(CALLS)), []
        if side == "gateway":
            opened = [await self.open() for _ in range(-(-count // len(CALLS)))]
            turns = ((workflow, endpoints) for _ in rounds for workflow, endpoints in opened)
            requests = [self.next_call(workflow, endpoints) for workflow, endpoints in itertools.islice(turns, count)]
        else:
            workflows = [Workflow(next(self._numbers)) for _ in range(-(-count // len(CALLS)))]
            calls = ((workflow, call) for call in CALLS for workflow in workflows)
            requests = [self.traffic.to_router(w, self.direct[side], *c) for w, c in itertools.islice(calls, count)]
            self.sent += count
        before = self.meter.cpu()
        outcome = await load(requests)
        used = {name: seconds - before[name] for name, seconds in self.meter.cpu().items()}
        for workflow, _ in opened:
            await self.finalize(workflow)
        return {
            "side": side,
            "requests": count,
            "p50_ms": outcome.quantile_ms(0.5),
            "p99_ms": outcome.quantile_ms(0.99),
            "rate": outcome.rate,
            "cpu_ms": {name: 1e3 * seconds / count for name, seconds in used.items()},
            "not_2xx": outcome.not_2xx,
            "misrouted": outcome.misrouted,
        }

    async def engine_counts(self) -> dict[str, int]:
        """What all engines were asked, by their own count."""
        total = {"generated": 0, "misrouted": 0}
        async with httpx.AsyncClient(trust_env=False) as http:
            for url in self._engines.values():
                counts = (await http.get(url + "/counts")).json()
                total = {name: total[name] + counts[name] for name in total}
        return total


async def soak(bench: Bench, workflows: int, requests: int) -> tuple[dict[str, Any], list[Workflow]]:
    """``workflows`` always open, ``requests`` calls round robin over them; each that ends is replaced.

    Returns:
        What was measured, and the workflows that are open at the end.
    """
    before = bench.meter.cpu()["gateway"]
    # They begin at different places of their lives, or all would end at once.
    idle = deque([await bench.open(first=slot % len(CALLS)) for slot in range(workflows)])
    opened = bench.meter.cpu()["gateway"]
    memory: list[tuple[int, float]] = []

    async def step(outcome: Outcome) -> None:
        workflow, endpoints = idle.popleft()
        await bench.client.send(bench.next_call(workflow, endpoints), outcome)
        if bench.over(workflow):
            await bench.finalize(workflow)
            workflow, endpoints = await bench.open()
        idle.append((workflow, endpoints))

    def steps() -> Iterator[Callable[[Outcome], Awaitable[None]]]:
        for number in range(requests):
            if number % SOAK_CONCURRENCY == 0:
                memory.append((number, bench.meter.rss_mb("gateway")))
            yield step

    outcome = await at_once(SOAK_CONCURRENCY, steps())
    used = bench.meter.cpu()["gateway"] - opened
    settled = np.array([sample for sample in memory if sample[0] >= requests * 0.6])
    result = {
        "workflows_open": workflows,
        "requests": requests,
        "not_2xx": outcome.not_2xx,
        "misrouted": outcome.misrouted,
        "rate": outcome.rate,
        "cpu_ms_per_creation": 1e3 * (opened - before) / workflows,
        "cpu_ms_per_request_all_included": 1e3 * used / requests,
        "rss_mb": {"begin": memory[0][1], "settled": float(settled[0, 1]), "end": memory[-1][1]},
        "rss_kb_per_request": 1024 * float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0]),
    }
    return result, [workflow for workflow, _ in idle]


async def compare(bench: Bench, concurrency: int, count: int, rounds: int) -> list[dict[str, Any]]:
    """Router, relay and gateway in turn, ``count`` requests each, ``concurrency`` at once."""

    async def load(requests: list[Request]) -> Outcome:
        return await at_once(concurrency, (lambda outcome, r=r: bench.client.send(r, outcome) for r in requests))

    return [
        {"concurrency": concurrency, "round": number} | await bench.measure(side, count, load)
        for number, side in _turns(rounds)
    ]


async def compare_open(bench: Bench, rate: float, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The same with ``rate`` Poisson arrivals per second, whatever comes back."""

    def load(seed: int) -> Load:
        return lambda requests: per_second(bench.client, rate, requests, seed)

    return [
        {"asked_rate": rate, "round": number} | await bench.measure(side, int(rate * seconds), load(number))
        for number, side in _turns(rounds)
    ]


def _turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Each side once per round; the one that begins changes."""
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            yield number, side


def check_rows(bench: Bench, files: list[Path]) -> dict[str, Any]:
    """Every workflow's rows, against what was sent: each once, and right to the last id."""
    records = [record for file in files for record in read_records(file)]
    wrong = [
        fault
        for record in records
        for fault in bench.traffic.wrong_rows(
            record, CALLS[bench.first[record.workflow_id] : bench.next[record.workflow_id]]
        )
    ]
    ended = [record.workflow_id for record in records]
    return {
        "workflows": len(bench.first),
        "records": len(records),
        "rows": sum(len(record.trajectories) for record in records),
        "calls": sum(bench.next[workflow] - first for workflow, first in bench.first.items()),
        "every_workflow_once": sorted(ended) == sorted(bench.first),
        "wrong": len(wrong),
        "examples": wrong[:5],
    }


async def settle() -> None:
    """Let what the last phase left behind (closing connections, garbage) not disturb the next."""
    await asyncio.sleep(0.2)
