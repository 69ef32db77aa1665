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
"""Agent frameworks, unchanged, against what a job serves: gateway, sglang-router, CPU engines, driver and ledger.

The models are tiny and know one thing: the planner restates a sum, the solver computes it with a tool. So every tool
call here was sampled. Nothing trains; the rows are checked where a trainer takes them.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from recipe.multi_policy_async.assets.prepare_models import TINY
from recipe.multi_policy_async.assets.prepare_tasks import build_tasks
from recipe.multi_policy_async.backends.cpu.generation_request import GenerationRequest
from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.gateway.client import GatewayControlClient
from recipe.multi_policy_async.gateway.router_process import RouterProcess
from recipe.multi_policy_async.gateway.spec import GatewaySpec
from recipe.multi_policy_async.gateway_binding_registry import ModelState, ModelStatus
from recipe.multi_policy_async.ingest.batch_source import IngestBatchSource, TakenBatch
from recipe.multi_policy_async.multi_model_gateway_router import MultiModelGatewayRouter
from recipe.multi_policy_async.tests.fakes.driven_job import workflow_spec
from recipe.multi_policy_async.tests.fakes.gateway_world import DEFAULTS, binding
from recipe.multi_policy_async.tests.fakes.workflow_records import PLANNER, SOLVER, ingest_spec, queue_spec
from recipe.multi_policy_async.tests.http_server import HttpServer
from recipe.multi_policy_async.trajectory import Trajectory, Version
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor
from recipe.multi_policy_async.workflow_driver import WorkflowDriver
from recipe.multi_policy_async.workflows.dataset import TaskDataset
from recipe.multi_policy_async.workflows.loader import load_workflow_class

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "examples" / "multi_policy" / "agents"
MAPPING = {"planner": PLANNER, "solver": SOLVER}
TASKS, MEMBERS = 3, 2
FIRST = Version(0, 1)

FRAMEWORKS = {
    "langgraph": ("langgraph_workflow.py", "PlannerSolver", {}, ("langgraph", "langchain_openai")),
    "ag2": ("ag2_workflow.py", "PlannerSolver", {}, ("ag2",)),
    "openai-agents over responses": ("openai_agents_workflow.py", "PlannerSolver", {}, ("agents",)),
    "openai-agents over chat": ("openai_agents_workflow.py", "PlannerSolver", {"api": "chat"}, ("agents",)),
    "anthropic": ("anthropic_workflow.py", "PlannerSolver", {}, ("anthropic",)),
    "openai, asynchronous, streamed": ("openai_workflow.py", "StreamedPlannerSolver", {}, ()),
    "openai, synchronous": ("openai_workflow.py", "PlannerSolver", {}, ()),
}


class WatchedEngine(HFEngine):
    """Keeps what it sampled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        super().submit(request)
        self.requests.append(request)


class Policy:
    """One model on one engine behind a router, as a job serves it."""

    def __init__(self, model_id: str, folder: Path, log: Path):
        self.model_id, self.folder = model_id, folder
        model = AutoModelForCausalLM.from_pretrained(folder)
        self.engine = WatchedEngine(
            model,
            max_model_len=576,
            max_batch_size=16,
            eos_token_ids=[model.generation_config.eos_token_id],
            model_path=str(folder),
        )
        self.server = HttpServer(engine=self.engine, incarnation=FIRST.incarnation)
        self.server.start()
        self.server.service.set_version(FIRST.number)
        assert self.server.call(self.server.service.resume())
        self.router = RouterProcess(model_id, [self.server.url], "sglang_router", log)
        self.router.start()

    def stop(self) -> None:
        self.router.stop()
        self.server.stop()


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> Iterator[dict[str, Policy]]:
    folder = Path(os.environ.get("ASSETS_DIR", ROOT / ".cache" / "assets")) / "tiny_tools"
    prepare = [sys.executable, "-m", "recipe.multi_policy_async.assets.prepare_models", "--kind", "tiny_tools"]
    subprocess.run([*prepare, "--out", str(folder)], cwd=ROOT, check=True)
    logs = tmp_path_factory.mktemp("logs")
    started: dict[str, Policy] = {}
    try:
        for agent, model_id in MAPPING.items():
            started[model_id] = Policy(model_id, folder / agent, logs / f"{agent}.log")
        for policy in started.values():
            asyncio.run(policy.router.wait_ready(60))
        yield started
    finally:
        for policy in started.values():
            policy.stop()


@pytest.fixture(scope="module")
def tasks() -> TaskDataset:
    train, _ = build_tasks("chain_sum", TINY.tasks, TASKS, 1, seed=5)
    return TaskDataset(train, prompt_key="prompt")


@asynccontextmanager
async def job(tmp_path, policies, tasks, workflow, **gateway):
    """Everything of a job but its trainers."""
    ingestor = TrajectoryIngestor(tmp_path / "ledger.sqlite", ingest_spec())
    spec = GatewaySpec.model_validate({**DEFAULTS, **gateway})
    router = MultiModelGatewayRouter(spec, MAPPING, tuple(policies), ingestor.ingest)
    control = GatewayControlClient(await router.start(), router.control_key)
    try:
        for policy in policies.values():
            await ingestor.register_policy(policy.model_id, queue_spec(max_lead_groups=100), True)
            urls = {"replica_urls": [policy.server.url], "max_response_length": 128}
            await router.bind(binding(policy.model_id, policy.folder, policy.router.url, **urls))
            await router.set_status(policy.model_id, ModelStatus(ModelState.OPEN, FIRST))
        settings = workflow_spec(n=MEMBERS, timeout_s=60.0)
        order = {"shuffle": False, "seed": 0, "epochs": 1}
        driver = WorkflowDriver(settings, workflow, tasks, control, ingestor, run_dir=tmp_path, poll_s=0.05, **order)
        yield ingestor, driver
        await driver.stop()
    finally:
        await control.close()
        await router.stop()
        await ingestor.close()


@pytest.mark.parametrize("rows", ["per_call", "merged"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_agents_of_a_framework_feed_the_queues_of_both_policies(tmp_path, policies, tasks, framework, rows):
    """Invariant 1 over the whole path: ids under mask 1 are exactly the ids the engines sampled."""
    file, name, kwargs, packages = FRAMEWORKS[framework]
    for package in packages:
        pytest.importorskip(package, reason=f"needs the extra of {framework} (setup.py)")
    workflow = load_workflow_class(name, str(AGENTS / file))(**kwargs)
    before = {model_id: len(policy.engine.requests) for model_id, policy in policies.items()}

    async def run():
        async with job(tmp_path, policies, tasks, workflow, rows=rows) as (ingestor, driver):
            await driver.run()
            batches = {}
            for model_id in policies:
                source = IngestBatchSource(ingestor, model_id, groups=TASKS, poll_s=0.05)
                batches[model_id] = await source.next_batch(FIRST)
            return batches, await driver.stats()

    batches, driver = asyncio.run(run())
    assert driver["finished"] == TASKS * MEMBERS and driver["failed"] == 0, driver["last_error"]
    endings = set()
    for model_id, policy in policies.items():
        batch, sampled = batches[model_id], policy.engine.requests[before[model_id] :]
        assert isinstance(batch, TakenBatch) and len(batch.groups) == TASKS
        taken = [row for group in batch.groups for row in group.trajectories]
        turns = [turn for row in taken for turn in _turns(row)]
        assert Counter(turns) == Counter((tuple(r.prompt_ids), tuple(r.output_ids)) for r in sampled)
        assert len(taken) == len(turns) if rows == "per_call" else len(taken) == TASKS * MEMBERS
        for row in taken:
            assert set(row.versions[row.response_mask == 1]) == {FIRST.number} and 0 <= row.reward <= 1
            endings |= {call["finish_reason"] for call in row.metadata["calls"]}
    assert "tool_calls" in endings, "a tool was called"


class ForcedToCall:
    """The solver must call the tool, say a number as JSON, and may then say what it likes."""

    digit = {"type": "integer", "enum": list(range(10))}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "calculate", "parameters": schema}}]
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}

    async def run(self, task, agents):
        plan = await agents["planner"].chat([{"role": "user", "content": task.question}])
        ask = {"model": "m", "messages": [{"role": "user", "content": plan}], "max_tokens": 100}
        create = agents["solver"].client.chat.completions.create
        forced = (await create(**ask, tools=self.tools, tool_choice="required")).choices[0]
        number = (await create(**ask, response_format=self.form)).choices[0]
        await create(**ask)
        [call] = forced.message.tool_calls
        numbers = [json.loads(text)["n"] for text in (call.function.arguments, number.message.content)]
        return float(call.function.name == "calculate" and all(n in range(10) for n in numbers))


def test_answers_under_a_grammar_are_sampled_by_the_engine_and_counted_not_trained(tmp_path, policies, tasks):
    async def run():
        async with job(tmp_path, policies, tasks, ForcedToCall(), constrained="exclude") as (ingestor, driver):
            await driver.run()
            return await ingestor.stats(), await driver.stats()

    stats, driver = asyncio.run(run())
    assert driver["finished"] == TASKS * MEMBERS and driver["failed"] == 0, driver["last_error"]
    assert stats[SOLVER]["dropped"] == {"constrained": 2 * TASKS * MEMBERS}
    assert stats[SOLVER]["accepted"] == 3 * TASKS * MEMBERS and stats[SOLVER]["unaccounted"] == 0
    assert driver["score_mean"] == 1.0, "every answer was what its schema says"


def _turns(row: Trajectory) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every run of mask 1 with all ids before it: what the engine got, and what it sampled."""
    before = row.prompt_ids.tolist()
    for sampled, run in groupby(zip(row.response_mask.tolist(), row.response_ids.tolist(), strict=True), itemgetter(0)):
        ids = [token_id for _, token_id in run]
        if sampled:
            yield tuple(before), tuple(ids)
        before = before + ids
