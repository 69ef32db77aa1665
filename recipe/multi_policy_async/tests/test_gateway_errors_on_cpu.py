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
"""Client faults: a provider-shaped 4xx that names what is wrong, and a session that lives on (invariant 9)."""

import asyncio
import re
import threading

import httpx
import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..gateway.agent_routes import agent_routes
from ..gateway.errors import BadRequest
from ..gateway.openai_lowering import lower_chat
from ..gateway.openapi import agent_paths
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import gateway_world
from .fakes.tiny_model_folder import make_model_folder

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


def two_models(folder, texts, **kwargs):
    engines = {"planner_model": FakeEngine(texts.says("plan")), "solver_model": FakeEngine(texts.says("42"))}
    return gateway_world(folder, engines, **kwargs)


FAULTS = {
    "not JSON": (b"{", "JSON"),
    "a lone surrogate": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "JSON"),
    "not an object": (b"[]", "object"),
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages is empty"),
    "a message that is none": ({"messages": ["hi"]}, r"messages\[0\]"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]\.role"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AA=="}}]}]},
        r"takes no images.*messages\[0\]\.content\[0\]\.image_url\.url",
    ),
    "a tool result without its call": ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    "n of 0": ({"messages": ASK, "n": 0}, "n must be"),
    "n too large": ({"messages": ASK, "n": 1000}, "n must be"),
    "temperature as text": ({"messages": ASK, "temperature": "hot"}, "temperature"),
    "max_tokens of 0": ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
    "a boolean max_tokens": ({"messages": ASK, "max_tokens": True}, "max_tokens"),
    "an empty stop string": ({"messages": ASK, "stop": ""}, "stop"),
    "top_logprobs alone": ({"messages": ASK, "top_logprobs": 3}, "logprobs"),
    "json mode": ({"messages": ASK, "response_format": {"type": "json_object"}}, "response_format"),
    "the old functions": ({"messages": ASK, "functions": [{"name": "f"}]}, "use tools"),
    "a web search": ({"messages": ASK, "web_search_options": {}}, "web search is not supported"),
    "a forced tool": (
        {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        "tool_choice",
    ),
    "another template": ({"messages": ASK, "chat_template_kwargs": {"chat_template": "x"}}, "must not set"),
}


def test_every_malformed_body_is_a_400_that_names_the_field_and_the_session_lives_on(folder, texts):
    async def run():
        async with two_models(folder, texts) as world:
            url = (await world.open(W))["planner"].openai_base_url + "/chat/completions"
            async with httpx.AsyncClient(verify=False) as http:
                answers = {
                    name: await http.post(url, content=body if isinstance(body, bytes) else orjson.dumps(body))
                    for name, (body, _) in FAULTS.items()
                }
                good = await http.post(url, json={"messages": ASK})
            final = await world.control.finalize(W, rewards=1.0)
            return answers, good, final, world.engines["planner_model"].requests

    answers, good, final, requests = asyncio.run(run())
    for name, answer in answers.items():
        error = answer.json()["error"]
        assert answer.status_code == 400, name
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error", name
        assert answer.headers["x-should-retry"] == "false", name
        assert re.search(FAULTS[name][1], error["message"] + str(error["param"])), (name, error)
    assert good.status_code == 200 and len(requests) == 1
    assert final["accepted"] == {"planner_model": 1}


def test_a_prompt_that_does_not_fit_is_told_with_true_token_counts_and_never_sent(folder, texts):
    async def run():
        async with two_models(folder, texts) as world:
            client = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 600}])
            return caught.value, world.engines["planner_model"].requests

    error, requests = asyncio.run(run())
    true_count = len(texts.prompt("x" * 600))
    assert error.code == "context_length_exceeded" and requests == []
    assert f"resulted in {true_count} tokens" in str(error) and "512 tokens" in str(error)


def test_a_budget_that_does_not_fit_behind_the_prompt_is_refused_and_one_left_open_shrinks(folder, texts):
    small = {"max_prompt_length": 40, "max_response_length": 30, "max_model_len": 45}

    async def run():
        async with two_models(folder, texts, bindings={"planner_model": small}) as world:
            client = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=ASK, max_tokens=30)
            await client.chat.completions.create(model="m", messages=ASK)
            return caught.value, world.engines["planner_model"].requests

    error, [request] = asyncio.run(run())
    prompt = len(texts.prompt("hello"))
    assert error.code == "context_length_exceeded" and "45 tokens" in str(error) and "30 more" in str(error)
    assert request["sampling_params"]["max_new_tokens"] == 45 - prompt < 30


@pytest.mark.parametrize(
    ("path", "code", "names"),
    [
        ("/w/nonsense/agents/planner/v1/chat/completions", "workflow_not_found", ""),
        ("/w/{token}/agents/plannner/v1/chat/completions", "agent_not_found", "checker.*planner.*solver"),
        ("/w/{token}/agents/planner/v1/embeddings", "path_not_found", ""),
    ],
)
def test_unknown_workflows_agents_and_paths_are_404s_that_name_the_known_ones(folder, texts, path, code, names):
    async def run():
        async with two_models(folder, texts) as world:
            token = (await world.open(W))["planner"].openai_base_url.split("/w/")[1].split("/")[0]
            async with httpx.AsyncClient(verify=False) as http:
                return await http.post(world.base_url + path.format(token=token), json={"messages": ASK})

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    assert re.search(names, answer.json()["error"]["message"])


def test_a_method_that_a_path_does_not_take_is_a_405_that_names_those_it_takes(folder, texts):
    async def run():
        async with two_models(folder, texts) as world:
            url = (await world.open(W))["planner"].openai_base_url
            async with httpx.AsyncClient(verify=False) as http:
                return [await http.request("OPTIONS", f"{url}/{path}") for path in ("chat/completions", "models")]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [405, 405]
    assert [set(answer.headers["allow"].split(", ")) for answer in answers] == [{"POST"}, {"GET", "HEAD"}]


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "messages/batches", 404), ("GET", "messages", 405)])
def test_a_path_or_method_of_anthropics_that_is_not_served_is_told_in_anthropics_shape(
    folder, texts, method, path, status
):
    async def run():
        async with two_models(folder, texts) as world:
            url = (await world.open(W))["planner"].openai_base_url
            async with httpx.AsyncClient(verify=False) as http:
                return await http.request(method, f"{url}/{path}")

    answer = asyncio.run(run())
    assert answer.status_code == status and set(answer.json()) == {"type", "error"}


@pytest.mark.parametrize("behind", ["the control API", "an agent's route"])
def test_a_bug_is_a_503_in_shape_and_counted_once(folder, texts, behind):
    async def run():
        async with two_models(folder, texts) as world:
            agent_url = (await world.open(W))["planner"].openai_base_url
            world.gateway.routes = None  # the bug
            control = behind == "the control API"
            url = f"{world.base_url}/control/v1/workflows" if control else f"{agent_url}/chat/completions"
            key = {"authorization": f"Bearer {world.router.control_key}"}
            async with httpx.AsyncClient(verify=False, headers=key) as http:
                answer = await http.post(url, json={"workflow_id": "e0-t1-s0-a0"} if control else {"messages": ASK})
            return answer, world.metric("errors_total", code="internal")

    answer, counted = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"], counted) == (503, "internal", 1.0)


def test_strict_model_names_refuse_another_models_name(folder, texts):
    async def run():
        async with two_models(folder, texts, model_names="strict") as world:
            client = world.client((await world.open(W))["planner"])
            good = await client.chat.completions.create(model="planner_model", messages=ASK)
            with pytest.raises(openai.NotFoundError, match="planner_model"):
                await client.chat.completions.create(model="solver_model", messages=ASK)
            return good.model

    assert asyncio.run(run()) == "planner_model"


def test_bodies_beyond_the_bound_are_413_on_both_apis(folder, texts):  # invariant 10
    async def run():
        async with two_models(folder, texts, max_body_bytes=1000) as world:
            url = (await world.open(W))["planner"].openai_base_url + "/chat/completions"
            key = {"authorization": f"Bearer {world.router.control_key}"}
            async with httpx.AsyncClient(verify=False) as http:
                agent = await http.post(url, content=b"x" * 2000)
                control = await http.post(f"{world.base_url}/control/v1/workflows", content=b"x" * 2000, headers=key)
                good = await http.post(url, json={"messages": ASK})
            return agent, control, good

    agent, control, good = asyncio.run(run())
    assert (agent.status_code, control.status_code, good.status_code) == (413, 413, 200)
    assert agent.json()["error"]["code"] == control.json()["error"]["code"] == "request_too_large"


def test_a_request_head_beyond_its_bound_ends_the_connection_and_no_other_request(folder, texts):  # invariant 10
    async def run():
        async with two_models(folder, texts, max_header_bytes=4096) as world:
            host, port = world.base_url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /w/x HTTP/1.1\r\nhost: x\r\n" + b"x-padding: " + b"y" * 5000)  # and never ends
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            client = world.client((await world.open(W))["planner"])
            return answer, await client.chat.completions.create(model="m", messages=ASK)

    answer, good = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 431") and good.choices[0].message.content == "plan"


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Basic abc", "Bearer ü"])
def test_the_control_api_needs_its_key(folder, texts, key):
    async def run():
        async with two_models(folder, texts) as world:
            headers = {} if key is None else {"authorization": key.encode()}
            async with httpx.AsyncClient(verify=False, base_url=world.base_url) as http:
                return [
                    (await http.post("/control/v1/workflows", json={"workflow_id": W}, headers=headers)).status_code,
                    (await http.get(f"/control/v1/workflows/{W}", headers=headers)).status_code,
                    (await http.get("/healthz", headers=headers)).status_code,
                ]

    assert asyncio.run(run()) == [401, 401, 200]


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "{}"])
def test_the_key_is_taken_in_any_case_of_its_scheme(folder, texts, form):
    async def run():
        async with two_models(folder, texts) as world:
            headers = {"authorization": form.format(world.router.control_key)}
            async with httpx.AsyncClient(verify=False, base_url=world.base_url, headers=headers) as http:
                return (await http.post("/control/v1/workflows", json={"workflow_id": W})).status_code

    assert asyncio.run(run()) == 200


def test_readiness_is_told_per_model(folder, texts):
    from ..gateway_binding_registry import ModelState

    async def run():
        async with two_models(folder, texts) as world:
            async with httpx.AsyncClient(verify=False, base_url=world.base_url) as http:
                before = (await http.get("/readyz")).status_code
                await world.set_state("solver_model", ModelState.SYNCING)
                paths = ("/readyz", "/readyz/planner_model", "/readyz/solver_model", "/readyz/other")
                after = [(await http.get(path)).status_code for path in paths]
                metrics = (await http.get("/metrics")).text
            return before, after, metrics

    before, after, metrics = asyncio.run(run())
    assert (before, after) == (200, [503, 200, 503, 404])
    assert "gateway_in_flight_at_pause" in metrics


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    "messages model n stop max_tokens max_completion_tokens temperature top_p top_k min_p seed logit_bias stream "
    "stream_options logprobs top_logprobs tools tool_choice parallel_tool_calls response_format modalities audio "
    "functions function_call frequency_penalty presence_penalty repetition_penalty chat_template_kwargs"
).split()
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
    optional={key: JSON for key in ("content", "tool_calls", "tool_call_id", "name", "reasoning_content")},
)


@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), messages=st.lists(MESSAGE, max_size=3) | JSON)
@settings(max_examples=200, deadline=None)
def test_no_body_makes_lowering_fail_in_another_way_than_a_bad_request(body, messages):
    try:
        request = lower_chat({"messages": messages, **body}, max_choices=4)
    except BadRequest:
        return
    assert request.messages and all(isinstance(message["content"], str) for message in request.messages)


NESTED = '{"a":' * 150 + "1" + "}" * 150


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("chat/completions", f'{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {NESTED}}}'),
        ("messages", f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": [{NESTED}]}}]}}'),
        ("completions", f'{{"prompt": "x", "logit_bias": {NESTED}}}'),
    ],
)
def test_a_body_nested_deeper_than_anything_reads_is_a_400(folder, texts, protocol, body):
    async def run():
        async with two_models(folder, texts) as world:
            url = (await world.open(W))["planner"].openai_base_url
            async with httpx.AsyncClient(verify=False) as http:
                return await http.post(f"{url}/{protocol}", content=body)

    answer = asyncio.run(run())
    assert answer.status_code == 400 and "nested deeper" in answer.text


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_a_long_request_is_rendered_beside_the_loop_which_serves_everybody(tmp_path, texts, path, caplog):
    async def run():
        async with two_models(make_model_folder(tmp_path, template="{{ raise_exception('no') }}"), texts) as world:
            url = f"{(await world.open(W))['planner'].openai_base_url}/{path}"
            async with httpx.AsyncClient(verify=False) as http:
                for count in (1, 5000):
                    answer = await http.post(url, json={"messages": ASK * count})
                    assert answer.status_code == 400 and "no" in answer.text

    with caplog.at_level("INFO", logger="recipe.multi_policy_async.gateway.tokenizer"):
        asyncio.run(run())
    short, long = (record.thread for record in caplog.records if "refused" in record.message)
    assert short == threading.get_ident() != long


@pytest.mark.parametrize("rewards", [rb'{"x": 1, "\ud800": 2}', b'{"planner": NaN}'])
def test_a_control_body_that_could_not_be_written_down_again_is_a_400(folder, texts, rewards):
    async def run():
        async with two_models(folder, texts) as world:
            await world.open(W)
            key = {"authorization": f"Bearer {world.router.control_key}", "content-type": "application/json"}
            url = f"{world.base_url}/control/v1/workflows/{W}/finalize"
            async with httpx.AsyncClient(verify=False, headers=key) as http:
                return await http.post(url, content=b'{"rewards": %s}' % rewards), await world.control.finalize(W)

    answer, final = asyncio.run(run())
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_request"
    assert final["status"] == "no_calls"


def test_the_openapi_document_names_every_agent_route(folder, texts):
    async def run():
        async with two_models(folder, texts) as world:
            routes = agent_routes(world.gateway, check_key=lambda scope: None)
            return {route.path.replace(":path", "") for route in routes}, world.router.app.openapi()["paths"]

    served, documented = asyncio.run(run())
    assert served == set(agent_paths()) and served < set(documented)
    assert "/control/v1/workflows/{workflow_id}/finalize" in documented


def test_the_openapi_document_names_the_statuses_that_the_control_api_answers_with(folder, texts):
    async def run():
        async with two_models(folder, texts) as world:
            return world.router.app.openapi()["paths"]

    paths = asyncio.run(run())
    control = [operation for path in paths if path.startswith("/control/") for operation in paths[path].values()]
    assert len(control) == 8 and all(set(operation["responses"]) == {"200", "4XX", "503"} for operation in control)
    assert {"200", "404", "503"} <= set(paths["/readyz/{model_id}"]["get"]["responses"])


def test_the_openapi_document_allows_every_tool_choice_that_is_served():
    chat, responses = (
        agent_paths()[f"/v1/{path}"]["post"]["requestBody"] for path in ("chat/completions", "responses")
    )
    choices = [body["content"]["application/json"]["schema"]["properties"]["tool_choice"] for body in (chat, responses)]
    assert choices == [{"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]}] * 2
