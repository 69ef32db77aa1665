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
"""The real router programs in front of two CPU rollout servers of one model: the conformance suite of both."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from recipe.multi_policy_async.gateway.router_process import RouterProcess
from recipe.multi_policy_async.tests.fakes.router_programs import PROGRAMS
from recipe.multi_policy_async.tests.http_server import MAX_LEN, HttpServer, slow_model
from recipe.multi_policy_async.tests.tiny_qwen3 import tiny_qwen3

pytestmark = pytest.mark.slow

MODEL = tiny_qwen3()
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    return request.param


@pytest.fixture(scope="module")
def servers(program):
    made = [HttpServer(MODEL) for _ in range(2)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def router(program, servers, tmp_path_factory):
    """Started while the servers are still paused, as before a model's first weight sync."""
    log = tmp_path_factory.mktemp("router") / "router.log"
    process = RouterProcess("m", [server.url for server in servers], program, log, policy="cache_aware")
    process.start()
    try:
        asyncio.run(process.wait_ready(60))
        for server in servers:
            server.service.set_version(1)
            assert server.call(server.service.resume())
        yield process.url
    finally:
        process.stop()


def healthy(router: str) -> int:
    return sum(worker["is_healthy"] for worker in httpx.get(f"{router}/workers").json()["workers"])


def body(**params) -> dict:
    params = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}


def total(servers, field: str) -> int:
    return sum(getattr(server.engine, field) for server in servers)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"sampling_seed": 7, "temperature": 0.8, "stop_token_ids": [4]},
        {"sampling_seed": 7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    ],
)
def test_an_answer_through_the_router_equals_a_direct_one(servers, router, params):
    direct = httpx.post(f"{servers[0].url}/generate", json={**body(**params), "rid": "direct"}).json()
    routed = httpx.post(f"{router}/generate", json={**body(**params), "rid": "call#0"}).json()
    assert routed["meta_info"].pop("id") == "call#0"
    direct["meta_info"].pop("id")
    assert routed == direct
    assert routed["meta_info"]["weight_version"] == "2.1"


def test_a_stream_through_the_router_ends_with_done(router):
    with httpx.stream("POST", f"{router}/generate", json={**body(), "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(json.loads(lines[-2].removeprefix("data: "))["output_ids"]) == 8


def test_many_refused_requests_leave_the_servers_in_rotation(router):
    too_long = {**body(), "input_ids": [1] * MAX_LEN}
    statuses = {httpx.post(f"{router}/generate", json=too_long).status_code for _ in range(15)}
    assert statuses == {400}
    assert httpx.post(f"{router}/generate", json=body()).status_code == 200
    assert healthy(router) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_router_frees_its_row_on_the_server(servers, router, stream):
    payload = json.dumps({**body(max_new_tokens=240), "stream": stream}).encode()
    host, port = router.removeprefix("http://").split(":")
    with slow_model(MODEL, 0.02):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            servers[0].wait(lambda: total(servers, "num_running") == 1)
            time.sleep(0.05)
        servers[0].wait(lambda: total(servers, "num_running") == 0, timeout_s=3)


def test_a_call_that_meets_a_weight_sync_waits_behind_the_router_and_is_answered(servers, router):
    for server in servers:
        server.call(server.service.pause())
    answers: list[httpx.Response] = []
    call = threading.Thread(target=lambda: answers.append(httpx.post(f"{router}/generate", json=body(), timeout=30)))
    call.start()
    servers[0].wait(lambda: total(servers, "num_waiting") == 1)
    time.sleep(2.5)  # longer than the router's health check interval
    assert healthy(router) == 2
    for server in servers:
        server.service.set_version(2)
        server.call(server.service.resume())
    call.join(30)
    assert answers[0].json()["meta_info"]["weight_version"] == "2.2"
