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
import importlib.util
import os
import subprocess
import sys
import textwrap
import time

import pytest

from ..gateway.router_process import RouterDied, RouterProcess
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, binding, gateway_world
from .fakes.tiny_model_folder import make_model_folder

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="needs the package sglang-router"
)


def test_a_call_through_the_real_router_is_captured_exactly_and_client_faults_do_not_open_its_breaker(tmp_path):
    folder = make_model_folder(tmp_path / "model")
    texts = Texts(folder)

    async def run():
        engine = FakeEngine(texts.says("Plan: größer 😀"))
        async with gateway_world(folder, {"planner_model": engine}, mapping={"planner": "planner_model"}) as world:
            router = RouterProcess("planner_model", [engine.url], "sglang_router", tmp_path / "router.log")
            router.start()
            try:
                await router.wait_ready(30)
                await world.router.bind(binding("planner_model", folder, router.url, replica_urls=[engine.url]))
                client = world.client((await world.open(W))["planner"])
                engine.faults = [400] * 15
                refused = 0
                for _ in range(15):
                    try:
                        await client.chat.completions.create(model="m", messages=ASK)
                    except Exception as error:
                        refused += getattr(error, "status_code", 0) == 400
                whole = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, top_logprobs=1)
                stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
                streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                await world.control.finalize(W, rewards=1.0)
                return refused, whole, streamed, world.sink.rows
            finally:
                router.stop()

    refused, whole, streamed, rows = asyncio.run(run())
    assert refused == 15
    assert whole.choices[0].message.content == streamed == "Plan: größer 😀"
    assert [row.response_ids.tolist() for row in rows] == [texts.ids("Plan: größer 😀")] * 2


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


assert os.name == "posix"
