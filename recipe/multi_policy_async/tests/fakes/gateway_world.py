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
"""A gateway on loopback in front of fake engines, for tests: real HTTP everywhere, no Ray, no torch."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from ...gateway.client import GatewayControlClient
from ...gateway.spec import GatewaySpec
from ...gateway.tokenizer import PolicyTokenizer
from ...gateway_binding_registry import ModelBinding, ModelState, ModelStatus
from ...multi_model_gateway_router import MultiModelGatewayRouter
from ...rewards import TeamShare
from ...trajectory import Trajectory, Version, WorkflowRecord
from .fake_engine import FakeEngine, Script

DEFAULTS = yaml.safe_load((Path(__file__).parents[2] / "config/gateway/default.yaml").read_text())
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
ASK = [{"role": "user", "content": "hello"}]
MAPPING = {"planner": "planner_model", "solver": "solver_model", "checker": "solver_model"}


FIRST = Version(0, 1)


class CollectingSink:
    """Takes records as the ingestor would, and can be told to fail."""

    def __init__(self) -> None:
        self.records: list[WorkflowRecord] = []
        self.failures = 0

    async def __call__(self, record: WorkflowRecord) -> dict[str, int]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the ingestor is away")
        self.records.append(record)
        accepted: dict[str, int] = {}
        for row in record.trajectories:
            accepted[row.model_id] = accepted.get(row.model_id, 0) + 1
        return accepted

    @property
    def rows(self) -> list[Trajectory]:
        return [row for record in self.records for row in record.trajectories]


@dataclass
class World:
    """What a test needs to act on."""

    router: MultiModelGatewayRouter
    control: GatewayControlClient
    engines: dict[str, FakeEngine]
    sink: CollectingSink
    base_url: str
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def gateway(self) -> Any:
        return self.router.service

    def metric(self, name: str, /, **labels: str) -> float:
        return self.router.service.metrics.registry.get_sample_value(f"gateway_{name}", labels) or 0.0

    async def open(self, workflow_id: str, *, purpose: str = "train") -> dict[str, Any]:
        """Create a workflow; its agents' endpoints."""
        return await self.control.create_workflow(workflow_id, purpose=purpose)

    def client(self, endpoint: Any, **kwargs: Any) -> AsyncOpenAI:
        # Without TLS, whose setup would take longer than the test.
        http = httpx.AsyncClient(verify=False, timeout=30)
        url = endpoint.openai_base_url
        client = AsyncOpenAI(base_url=url, api_key="none", http_client=http, **{"max_retries": 0, **kwargs})
        self.clients.append(client)
        return client

    async def set_state(self, model_id: str, state: ModelState, version: Version = FIRST) -> None:
        await self.router.set_status(model_id, ModelStatus(state, version))


def anthropic_client(url: str) -> Any:
    """An ``AsyncAnthropic``; skips the test where the package is missing."""
    anthropic = pytest.importorskip("anthropic")  # here: it is slow to import
    import httpx2

    return anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, http_client=httpx2.AsyncClient(verify=False, timeout=30)
    )


def binding(model_id: str, folder: Path, url: str, **changes: Any) -> ModelBinding:
    """A binding of a trained model with room to spare."""
    values: dict[str, Any] = {
        "model_id": model_id,
        "model_path": str(folder),
        "trained": True,
        "incarnation": 0,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "max_prompt_length": 512,
        "max_response_length": 64,
        "max_model_len": 576,
        "router_url": url,
        "replica_urls": [url],
    }
    return ModelBinding(**{**values, **changes})


@asynccontextmanager
async def gateway_world(
    folder: Path,
    engines: dict[str, FakeEngine],
    *,
    mapping: dict[str, str] | None = None,
    bindings: dict[str, dict[str, Any]] | None = None,
    open_models: bool = True,
    team_share: TeamShare = 0.0,
    **spec: Any,
) -> AsyncIterator[World]:
    """Start engines and gateway, bind and open every model, and take all down again.

    Args:
        bindings: model id -> changes of its binding.
        team_share: share of the team's score in the agents' rewards.
        spec: changes of the gateway's defaults.
    """
    mapping = MAPPING if mapping is None else mapping
    sink = CollectingSink()
    checked = GatewaySpec.model_validate({**DEFAULTS, **spec})
    router = MultiModelGatewayRouter(checked, mapping, tuple(engines), sink, team_share=team_share)
    base_url = await router.start()
    control = GatewayControlClient(base_url, router.control_key)
    world = World(router, control, engines, sink, base_url)
    try:
        for model_id, engine in engines.items():
            url = await engine.start()
            await router.bind(binding(model_id, folder, url, **(bindings or {}).get(model_id, {})))
            if open_models:
                await world.set_state(model_id, ModelState.OPEN)
        yield world
    finally:
        for client in world.clients:
            await client.close()
        await control.close()
        await router.stop()
        for engine in engines.values():
            await engine.stop()


def one_model(folder: Path, engine: FakeEngine, **kwargs: Any) -> AbstractAsyncContextManager[World]:
    """A world of one agent and one model."""
    return gateway_world(folder, {"planner_model": engine}, mapping={"planner": "planner_model"}, **kwargs)


async def ask(client: AsyncOpenAI, *, stream: bool = False, **kwargs: Any) -> str:
    """What the model answers to ``ASK``."""
    answer = await client.chat.completions.create(model="any", messages=ASK, stream=stream, **kwargs)
    if not stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait for something to become true; fails when it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.002)


def slow(texts: "Texts") -> FakeEngine:
    """An engine that takes a tenth of a second to say the alphabet."""
    return FakeEngine(texts.says(ALPHABET), token_s=0.004)


class Texts:
    """Scripts of known texts in the ids of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PolicyTokenizer.load(str(folder))
        self.end = self.tokenizer.end_of_turn_ids[0]

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        return self.tokenizer.encode(text) + ([self.end] if end else [])

    def says(self, text: str, *, end: bool = True) -> Script:
        """The same answer to every prompt."""
        ids = self.ids(text, end=end)
        return lambda prompt: ids

    def echoes(self) -> Script:
        """An answer that depends on the prompt, so that a mixed-up answer is seen."""
        return lambda prompt: self.ids(f"{sum(prompt) % 9973}:{len(prompt)}")

    def prompt(self, *contents: str) -> list[int]:
        """Ids of a conversation of user and assistant messages in turn, ready for the answer."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        return self.tokenizer.encode(self.tokenizer.render(messages))
