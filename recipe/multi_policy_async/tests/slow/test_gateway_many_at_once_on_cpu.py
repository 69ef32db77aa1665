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
"""Many workflows at once over real HTTP, while both policies sync: what clients received is trained, exactly, once.

Agents of twelve workflows talk side by side, streamed or not, with tools, stop strings and small budgets; they
lose patience and retry; workflows are finalized while their agents still talk.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ...gateway_binding_registry import ModelState
from ...trajectory import Trajectory, Version, WorkflowRecord
from ..fakes.fake_engine import FakeEngine
from ..fakes.gateway_world import World, gateway_world

WORKFLOWS = 12
TURNS = 6
AGENTS = ("planner", "solver", "checker", "solver")  # the solver twice at once: branches of one agent
MODELS = ("planner_model", "solver_model")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = ("größer 😀", "abc def", f"I add {CALL}", "x" * 30, "END of")


@dataclass
class Answer:
    """What a client has of one call."""

    request_id: str
    message: dict[str, Any]


def read_answer(response: httpx.Response, *, stream: bool) -> Answer | None:
    """None for a stream that broke off."""
    if not stream:
        body = response.json()
        return Answer(body["metadata"]["request_id"], body["choices"][0]["message"])
    assert "\ufffd" not in response.text
    if "[DONE]" not in response.text:
        return None
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    if calls := [call for delta in deltas for call in delta.get("tool_calls", ())]:
        message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    return Answer(chunks[-1]["metadata"]["request_id"], message)


@dataclass
class Play:
    """One seed's world of clients."""

    world: World
    engines: dict[str, FakeEngine]
    http: httpx.AsyncClient
    rng: random.Random
    received: dict[str, set[str]] = field(default_factory=dict)  # by workflow, whole before it was finalized
    finals: list[dict[str, Any]] = field(default_factory=list)
    statuses: Counter[Any] = field(default_factory=Counter)

    async def sync_now_and_then(self) -> None:
        """New versions of a random policy, calls cut, until cancelled."""
        version = 1
        while True:
            await asyncio.sleep(self.rng.uniform(0.05, 0.2))
            model_id = self.rng.choice(MODELS)
            if self.rng.random() < 0.5:
                await self.world.router.drain(model_id)
            await self.world.set_state(model_id, ModelState.SYNCING, Version(0, version))
            engine = self.engines[model_id]
            engine.abort_all()
            while engine.running:
                await asyncio.sleep(0.002)
            version += 1
            engine.version = f"0.{version}"
            await self.world.set_state(model_id, ModelState.OPEN, Version(0, version))

    async def workflow(self, number: int) -> None:
        workflow_id = f"e0-t{number}-s0-a0"
        endpoints = await self.world.open(workflow_id)
        received: set[str] = set()
        talks = [asyncio.create_task(self.agent(endpoints[agent].openai_base_url, received)) for agent in AGENTS]
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        else:
            await asyncio.wait(talks)
        self.received[workflow_id] = set(received)
        self.finals.append(await self.world.control.finalize(workflow_id, rewards=1.0))
        await asyncio.gather(*talks)

    async def agent(self, url: str, received: set[str]) -> None:
        messages = [{"role": "user", "content": f"question {self.rng.random()}"}]
        for _ in range(TURNS):
            answer = await self.ask(url, messages)
            if answer is None:
                continue
            received.add(answer.request_id)
            calls = answer.message.get("tool_calls")
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"} if calls else None
            messages = [*messages, answer.message, result or {"role": "user", "content": "go on"}]

    async def ask(self, url: str, messages: list[dict[str, Any]]) -> Answer | None:
        """One question as an SDK asks it: impatient at times, tried again three times."""
        body = {"messages": messages, "stream": self.rng.random() < 0.5, "tools": TOOLS}
        if self.rng.random() < 0.2:
            body["stop"] = "END"
        if self.rng.random() < 0.2:
            body["max_tokens"] = 3
        for attempt in range(3):
            headers = {"x-stainless-retry-count": str(attempt)}
            patience = self.rng.choice([0.02, 0.05, 5, 5])
            try:
                response = await self.http.post(f"{url}/chat/completions", json=body, headers=headers, timeout=patience)
            except httpx.TimeoutException:
                self.statuses["left"] += 1
                continue
            self.statuses[response.status_code] += 1
            if response.status_code in (429, 503):
                continue
            return read_answer(response, stream=body["stream"]) if response.status_code == 200 else None
        return None


def check_exact(row: Trajectory, script) -> None:
    """Every run of mask 1 is what the engine says to all that stands before it."""
    ids, mask = row.response_ids.tolist(), row.response_mask.tolist()
    before, at = row.prompt_ids.tolist(), 0
    for call in row.metadata["calls"]:
        while not mask[at]:
            before.append(ids[at])
            at += 1
        end = at + call["sampled_tokens"]
        assert all(mask[at:end]) and ids[at:end] == script(before)[: end - at]
        before, at = before + ids[at:end], end
    assert at == len(ids)


def check_once(record: WorkflowRecord, received: set[str]) -> None:
    trained = Counter(call["request_id"] for row in record.trajectories for call in row.metadata["calls"])
    assert max(trained.values(), default=1) == 1
    assert received <= set(trained)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["merged", "per_call"])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_clients_received_while_much_happens_at_once_is_trained_exactly_once(folder, texts, rows, seed):
    def script(prompt):
        rng = random.Random(sum(prompt) * 31 + len(prompt))
        return texts.ids(rng.choice(ANSWERS))

    async def run() -> tuple[World, Play]:
        engines = {model_id: FakeEngine(script, token_s=0.003, chunk=2) for model_id in MODELS}
        room = {"max_prompt_length": 2048, "max_response_length": 400, "max_model_len": 3000}
        bindings = {model_id: {**room, "partial_rollout": model_id == MODELS[0]} for model_id in MODELS}
        short = {"retry_grace_s": 0.3, "finalize_grace_s": 0.3, "hold_timeout_s": 1.0}
        async with (
            gateway_world(folder, engines, bindings=bindings, rows=rows, **short) as world,
            httpx.AsyncClient(verify=False, limits=httpx.Limits(max_connections=200)) as http,
        ):
            play = Play(world, engines, http, random.Random(seed))
            syncs = asyncio.create_task(play.sync_now_and_then())
            await asyncio.gather(*(play.workflow(number) for number in range(WORKFLOWS)))
            syncs.cancel()
            await asyncio.sleep(0.5)
            assert [len(engine.running) for engine in engines.values()] == [0, 0], "no orphan is left at an engine"
            return world, play

    world, play = asyncio.run(run())
    assert play.statuses[200] > 50 and play.statuses["left"] > 0, "much was answered, and some left"
    assert world.metric("errors_total", code="internal") == 0
    assert not any({"running", "done"} & set(final["calls"]) for final in play.finals), "every call has its end"
    records = {record.workflow_id: record for record in world.sink.records}
    assert len(records) == len(world.sink.records) == WORKFLOWS
    for workflow_id, record in records.items():
        check_once(record, play.received[workflow_id])
        for row in record.trajectories:
            check_exact(row, script)
