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
"""Several gateway processes: each workflow belongs to one of them, and nothing is lost or doubled between them."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import ray
from openai import AsyncOpenAI
from pydantic import ValidationError

from ...gateway.client import GatewayControlClient
from ...gateway.spec import GatewaySpec
from ...gateway_group import GatewayGroup, add_stats
from ...supervision import JobFailedError
from ...workflows.failures import is_infrastructure
from ..fakes.child_process import Child
from ..fakes.fake_engine import FakeEngine
from ..fakes.gateway_process import DEFAULTS, read_records
from ..fakes.gateway_world import MAPPING, Texts
from ..fakes.tiny_model_folder import make_model_folder

pytestmark = pytest.mark.slow

MODULE = read_records.__module__
MODELS = ("planner_model", "solver_model")
WORKFLOWS = [f"e0-t{task}-s{sample}-a0" for task in range(6) for sample in range(4)]


class Gateways:
    """Real gateway processes before fake engines in this one."""

    def __init__(self, folder: Path, engines: dict[str, FakeEngine], children: list[Child], records: list[Path]):
        self.folder = folder
        self.engines = engines
        self.children = children
        self.records = records
        self.urls = [child.hello["url"] for child in children]
        self.control = GatewayControlClient(self.urls, "key")
        self._http = httpx.AsyncClient(verify=False, timeout=30)

    def of(self, workflow_id: str) -> int:
        return self.urls.index(self.control.owner(workflow_id))

    async def ask(self, endpoint, text: str) -> str:
        client = AsyncOpenAI(base_url=endpoint.openai_base_url, api_key="none", http_client=self._http, max_retries=0)
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        return answer.choices[0].message.content

    async def close(self) -> None:
        await self._http.aclose()
        await self.control.close()


@contextlib.asynccontextmanager
async def two_gateways(tmp_path):
    folder = make_model_folder(tmp_path / "model")
    engines = {model: FakeEngine(Texts(folder).echoes()) for model in MODELS}
    bindings = {}
    for model, engine in engines.items():
        url = await engine.start()
        bindings[model] = {
            "model_path": str(folder),
            "trained": True,
            "incarnation": 0,
            "sampling": {"temperature": 1.0},
            "max_prompt_length": 512,
            "max_response_length": 64,
            "max_model_len": 576,
            "router_url": url,
            "replica_urls": [url],
        }
    records = [tmp_path / f"records-{number}" for number in range(2)]
    config = {"agents": MAPPING, "bindings": bindings, "control_key": "key", "flush": True}
    children = [Child(MODULE, config | {"records": str(file)}) for file in records]
    try:
        await asyncio.gather(*(asyncio.to_thread(getattr, child, "hello") for child in children))
        gateways = Gateways(folder, engines, children, records)
        yield gateways
        await gateways.close()
    finally:
        for child in children:
            child.stop()
        for engine in engines.values():
            await engine.stop()


def test_every_workflow_stays_with_one_process_and_its_death_costs_no_other_processs_workflows(tmp_path):
    """Conservation over two processes (invariant 4), then one of them is killed."""

    async def play(gateways: Gateways, workflow_id: str) -> list[str]:
        endpoints = await gateways.control.create_workflow(workflow_id)
        assert endpoints == await gateways.control.create_workflow(workflow_id)  # the owner is found again
        return await asyncio.gather(*(gateways.ask(endpoints[a], f"{workflow_id} {a}") for a in ("planner", "solver")))

    async def run():
        async with two_gateways(tmp_path) as gateways:
            *whole, lost = WORKFLOWS
            answers = dict(zip(WORKFLOWS, await asyncio.gather(*(play(gateways, w) for w in WORKFLOWS)), strict=True))
            await asyncio.gather(*(gateways.control.finalize(w, rewards=1.0) for w in whole))
            endpoints = await gateways.control.create_workflow(lost)
            gateways.children[gateways.of(lost)].kill()
            faults = []
            for failing in (
                gateways.ask(endpoints["planner"], "again"),
                gateways.control.finalize(lost, rewards=1.0),
            ):
                try:
                    await failing
                except Exception as error:
                    faults.append(is_infrastructure(error, gateways.control.owner(lost)))
            other = next(f"e1-t{n}-s0-a0" for n in range(99) if gateways.of(f"e1-t{n}-s0-a0") != gateways.of(lost))
            await play(gateways, other)
            await gateways.control.finalize(other, rewards=1.0)
            return answers, whole, other, faults, [gateways.of(w) for w in whole]

    answers, whole, other, faults, owners = asyncio.run(run())
    records = [read_records(tmp_path / f"records-{number}") for number in range(2)]
    ended = {record.workflow_id: number for number, part in enumerate(records) for record in part}
    assert sum(map(len, records)) == len(ended) == len(whole) + 1  # each once
    assert [ended[w] for w in whole] == owners and set(owners) == {0, 1}
    texts = Texts(tmp_path / "model")
    for record in (record for part in records for record in part if record.workflow_id != other):
        rows = {row.agent_id: row for row in record.trajectories}
        assert {agent: row.model_id for agent, row in rows.items()} == {a: MAPPING[a] for a in ("planner", "solver")}
        for agent, answer in zip(("planner", "solver"), answers[record.workflow_id], strict=True):
            assert rows[agent].prompt_ids.tolist() == texts.prompt(f"{record.workflow_id} {agent}")
            assert rows[agent].response_ids.tolist() == texts.ids(answer)
    assert faults == [True, True]  # an attempt of its own is what follows, not a failed member


class FakeHandle:
    """An actor that waits for ever, or whose process has died."""

    def __init__(self, alive: bool) -> None:
        self._alive = alive
        self.wait_closed = SimpleNamespace(remote=self._wait)

    async def _wait(self) -> None:
        if not self._alive:
            raise ray.exceptions.ActorDiedError()
        await asyncio.Event().wait()


def test_a_process_that_dies_is_named():  # invariant 8
    async def run():
        await GatewayGroup([FakeHandle(True), FakeHandle(False)], "key").wait_closed()

    with pytest.raises(JobFailedError, match="^gateway 2 of 2: ActorDiedError"):
        asyncio.run(run())


def test_stats_of_several_processes_are_those_of_one():
    def stats(workflows, state, running, waiting, limit, waiting_for_slot):
        model = {"state": state, "version": "0.1", "running": running, "waiting": waiting}
        model |= {"limit": limit, "waiting_for_slot": waiting_for_slot}
        return {"workflows_open": workflows, "models": {"m": model}}

    one, other = stats(2, "open", 1, 0, 4, 1), stats(3, "syncing", 2, 4, 6, 2)
    unlimited = stats(1, "open", 0, 0, None, 0)
    for parts in ([one, other], [other, one]):
        assert add_stats(parts) == stats(5, "syncing", 3, 4, 10, 3)  # each process has a limit of its own
        assert add_stats([*parts, unlimited]) == stats(6, "syncing", 3, 4, None, 3)


def test_every_process_needs_a_port():
    GatewaySpec.model_validate({**DEFAULTS, "port": 65534, "processes": 2})
    with pytest.raises(ValidationError, match="one port each"):
        GatewaySpec.model_validate({**DEFAULTS, "port": 65535, "processes": 2})
