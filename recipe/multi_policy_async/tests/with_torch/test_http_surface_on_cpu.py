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
"""SGLang's HTTP surface of the CPU rollout server, over a real socket."""

import json
import socket
import threading
import time

import httpx
import pytest

from recipe.multi_policy_async.tests.http_server import MAX_LEN, HttpServer, slow_model
from recipe.multi_policy_async.tests.tiny_qwen3 import full_forward_log_probs, tiny_qwen3

pytestmark = pytest.mark.slow

MODEL = tiny_qwen3()
PROMPT = [3, 1, 4, 1, 5]
LONG = {"max_new_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def running():
    server = HttpServer(MODEL)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(running):
    running.call(running.service.pause())
    running.service.set_version(5)
    assert running.call(running.service.resume())
    return running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def generate(client, **body):
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 6}, **body}
    return client.post("/generate", json=body)


def stream_events(client, **body) -> list[dict | str]:
    body = {"input_ids": PROMPT, "return_logprob": True, "stream": True, **body}
    with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def test_an_answer_holds_ids_log_probs_and_the_weight_version(client):
    answer = generate(client, rid="call-1#0").json()
    meta = answer["meta_info"]
    reported = meta["output_token_logprobs"]
    assert meta["id"] == "call-1#0"
    assert meta["weight_version"] == "2.5"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 6, 0)
    assert [(token, text) for _, token, text in reported] == [(token, None) for token in answer["output_ids"]]
    expected = full_forward_log_probs(MODEL, PROMPT, answer["output_ids"])
    assert [log_prob for log_prob, _, _ in reported] == pytest.approx(expected, abs=1e-4)


def test_log_probs_are_left_out_unless_asked_for(client):
    meta = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}).json()
    assert "output_token_logprobs" not in meta["meta_info"]


def test_a_stream_is_cumulative_and_ends_with_the_same_answer_as_a_plain_call(client):
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    with slow_model(MODEL, 0.005):
        *chunks, done = stream_events(client, sampling_params=params)
    assert done == "[DONE]"
    assert len(chunks) > 3
    for earlier, later in zip(chunks, chunks[1:], strict=False):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert len(earlier["meta_info"]["output_token_logprobs"]) == len(earlier["output_ids"])
    plain = generate(client, sampling_params=params).json()
    assert chunks[-1]["output_ids"] == plain["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": []},
        {"input_ids": "text"},
        {"input_ids": [[1, 2]]},
        {"input_ids": [1, True]},
        {"input_ids": [10**6]},
        {"input_ids": [1] * (MAX_LEN + 1)},
        {"sampling_params": {"max_new_tokens": MAX_LEN}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"stop": "."}},
        {"text": "hello"},
        {"rid": ["a", "b"]},
        {"top_logprobs_num": 3},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_served_is_a_400_that_says_why_also_as_a_stream(client, body, stream):
    answer = generate(client, stream=stream, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_a_400(client):
    assert client.post("/generate", content=b"{").status_code == 400
    assert client.post("/generate", content=b"[]").status_code == 400


def test_a_rid_in_use_is_a_400_and_leaves_the_first_call_alone(server, client):
    with slow_model(MODEL, 0.01):
        thread, answers = in_thread(lambda: generate(client, rid="same", sampling_params={"max_new_tokens": 30}))
        server.wait(lambda: server.engine.num_running == 1)
        assert generate(client, rid="same").status_code == 400
        thread.join()
    assert len(answers[0].json()["output_ids"]) > 0


def test_an_abort_by_rid_returns_the_partial_output(server, client):
    with slow_model(MODEL, 0.01):
        thread, answers = in_thread(lambda: generate(client, rid="cut", sampling_params=LONG))
        server.wait(lambda: server.engine.num_running == 1)
        time.sleep(0.1)
        assert client.post("/abort_request", json={"rid": "other"}).status_code == 200
        assert client.post("/abort_request", json={"rid": "cut"}).status_code == 200
        thread.join()
    meta = answers[0].json()["meta_info"]
    assert answers[0].status_code == 200
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(answers[0].json()["output_ids"]) < 240
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(answers[0].json()["output_ids"])


def test_an_abort_of_one_rid_spares_rids_that_begin_with_it(server, client):
    with slow_model(MODEL, 0.005):
        thread, answers = in_thread(lambda: generate(client, rid="call#10", sampling_params={"max_new_tokens": 20}))
        server.wait(lambda: server.engine.num_running == 1)
        client.post("/abort_request", json={"rid": "call#1"})
        thread.join()
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] in ("length", "stop")


def test_abort_all_ends_every_call(server, client):
    with slow_model(MODEL, 0.01):
        calls = [in_thread(lambda: generate(client, sampling_params=LONG)) for _ in range(3)]
        server.wait(lambda: server.engine.num_running == 3)
        client.post("/abort_request", json={"abort_all": True})
        for thread, _ in calls:
            thread.join()
    assert {a[0].json()["meta_info"]["finish_reason"]["type"] for _, a in calls} == {"abort"}


def test_an_abort_that_names_nothing_is_a_400(client):
    assert client.post("/abort_request", json={}).status_code == 400


def test_while_paused_new_calls_wait_everything_else_answers_and_nothing_is_lost(server, client):
    server.call(server.service.pause())
    thread, answers = in_thread(lambda: generate(client))
    server.wait(lambda: server.engine.num_waiting == 1)
    for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        assert client.get(path).status_code == 200
    assert client.get("/health_generate").status_code == 503
    assert client.get("/server_info").json()["paused"]
    assert not answers
    server.service.set_version(6)
    server.call(server.service.resume())
    thread.join()
    assert answers[0].json()["meta_info"]["weight_version"] == "2.6"


def test_a_server_told_to_reject_answers_503_until_it_resumes(server, client):
    server.call(server.service.pause(reject=True))
    assert generate(client).status_code == 503
    server.call(server.service.resume())
    assert generate(client).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_503(server, client, monkeypatch, stream):
    monkeypatch.setattr(server.engine, "max_waiting", 0)
    assert generate(client, stream=stream).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_a_client_that_goes_away_frees_its_row_also_while_it_waits(server, stream, paused):
    if paused:
        server.call(server.service.pause())
    body = json.dumps({"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}).encode()
    with slow_model(MODEL, 0.01):
        with RawConnection(server.url) as connection:
            connection.post("/generate", body)
            server.wait(lambda: server.engine.num_waiting + server.engine.num_running == 1)
            time.sleep(0.05)
        server.wait(lambda: server.engine.num_waiting + server.engine.num_running == 0, timeout_s=1.5)


def test_an_engine_failure_is_a_500_and_the_next_call_is_served(client):
    hook = MODEL.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        failed = generate(client)
        event = stream_events(client, sampling_params={"max_new_tokens": 3})[0]
    finally:
        hook.remove()
    assert failed.status_code == 500
    assert event["error"]["code"] == 500
    assert generate(client).status_code == 200


def test_health_generate_makes_a_token(client):
    assert client.get("/health_generate").status_code == 200


def test_model_and_server_info_say_what_the_router_and_the_gateway_ask(client):
    assert client.get("/model_info").json() == client.get("/get_model_info").json()
    info = client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == ("some/model", "2.5", True)
    assert client.get("/server_info").json()["context_length"] == MAX_LEN
    assert client.get("/v1/loads").json() == {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]}
    assert client.post("/flush_cache").status_code == 200


def test_sixty_four_calls_at_once_are_all_answered(client):
    calls = [in_thread(lambda rid=f"many-{i}": generate(client, rid=rid)) for i in range(64)]
    for thread, _ in calls:
        thread.join()
    assert [answers[0].status_code for _, answers in calls] == [200] * 64


def in_thread(function):
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    return thread, answers


class RawConnection:
    """A connection that can be cut in the middle of an answer."""

    def __init__(self, url: str):
        host, port = url.removeprefix("http://").split(":")
        self._host = host
        self._socket = socket.create_connection((host, int(port)))

    def post(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_) -> None:
        self._socket.close()
