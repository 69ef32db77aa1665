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
"""The real router programs in front of the fake engine."""

import asyncio
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager

import openai
import pytest

from ...gateway.router_process import RouterDied, RouterProcess
from ..fakes.fake_engine import FakeEngine
from ..fakes.gateway_world import Texts, binding, one_model, until
from ..fakes.router_programs import PROGRAMS
from ..fakes.tiny_model_folder import make_model_folder

pytestmark = pytest.mark.slow

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def behind_router(folder, engines, program, log_path):
    """A gateway whose one model is reached through a real router over several replicas."""
    first, *others = engines
    async with one_model(folder, first) as world:
        urls = [first.url, *[await engine.start() for engine in others]]
        router = RouterProcess("planner_model", urls, program, log_path, policy="round_robin")
        router.start()
        try:
            await router.wait_ready(30)
            await world.router.bind(binding("planner_model", folder, router.url, replica_urls=urls))
            yield world, router
        finally:
            started = time.monotonic()
            router.stop()
            assert time.monotonic() - started < 4, "the router did not end on SIGTERM"
            for engine in others:
                await engine.stop()


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_through_a_real_router_are_captured_exactly(tmp_path, program):
    folder = make_model_folder(tmp_path / "model")
    texts = Texts(folder)

    async def run():
        prompts: dict[str, list[int]] = {}  # shared: a resumed call may reach the other replica
        say = texts.says("Plan: größer 😀")
        engines = [FakeEngine(say, token_s=0.001, prompt_of=prompts) for _ in range(2)]
        async with behind_router(folder, engines, program, tmp_path / "router.log") as (world, _):
            client = world.client((await world.open(W))["planner"])
            ask = {"model": "m", "messages": ASK}
            whole = await client.chat.completions.create(**ask, logprobs=True, top_logprobs=1)
            for engine in engines:
                engine.token_s = 0.02
            stream = await client.chat.completions.create(**ask, stream=True)
            seen = [(c.choices[0].delta.content, any(e.running for e in engines)) async for c in stream]
            for engine in engines:
                engine.token_s = 0.002
            # A client's fault must not take a server out of service: the router's breaker stays shut.
            for engine in engines:
                engine.faults = [400] * 8
            refused = 0
            for _ in range(16):
                try:
                    await client.chat.completions.create(**ask)
                except openai.BadRequestError:
                    refused += 1
            # One that leaves is ended at the server, whichever it is.
            leaving = asyncio.create_task(client.chat.completions.create(**ask))
            await until(lambda: any(engine.running for engine in engines))
            leaving.cancel()
            await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
            # A weight sync: the abort's partial output comes through and is resumed.
            cut = asyncio.create_task(client.chat.completions.create(**ask))
            await until(lambda: any(engine.running for engine in engines))
            for engine in engines:
                engine.version = "0.2"
                engine.abort_all()
            resumed = await cut
            await world.control.finalize(W, rewards=1.0)
            return whole, seen, refused, resumed, engines, world.sink.rows

    whole, seen, refused, resumed, engines, rows = asyncio.run(run())
    said = "Plan: größer 😀"
    assert whole.choices[0].message.content == resumed.choices[0].message.content == said
    assert "".join(text or "" for text, _ in seen) == said and any(running for text, running in seen if text)
    assert refused == 16
    assert all(row.response_ids.tolist() == texts.ids(said) for row in rows) and len(rows) == 11
    assert all(len([r for r in engine.rows if r[2] == "stop"]) >= 3 for engine in engines)  # both served
    assert rows[-1].metadata["calls"][0]["resumes"] == 1


def test_a_router_that_ends_by_itself_is_told_with_the_end_of_its_log(tmp_path):
    router = RouterProcess("planner_model", ["not a url"], "sglang_router", tmp_path / "router.log")
    router.start()
    try:
        with pytest.raises((RouterDied, TimeoutError), match="router.log"):
            asyncio.run(router.wait_ready(3))
    finally:
        router.stop()


def test_the_router_dies_with_its_parent(tmp_path):
    code = f"""
        import asyncio, os, signal
        from recipe.multi_policy_async.gateway.router_process import RouterProcess
        router = RouterProcess("m", ["http://127.0.0.1:9"], "sglang_router", {str(tmp_path / "router.log")!r})
        router.start()
        print(router.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    child = int(parent.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.02)
    assert not _alive(child)


@pytest.mark.parametrize(("program", "workers"), [("nginx", ["http://127.0.0.1:9"]), ("sglang_router", [])])
def test_a_router_that_cannot_be_started_is_refused_at_once(tmp_path, program, workers):
    with pytest.raises(ValueError):
        RouterProcess("planner_model", workers, program, tmp_path / "router.log")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
