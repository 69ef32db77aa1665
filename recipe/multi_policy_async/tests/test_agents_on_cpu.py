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
"""Agents: OpenAI clients bound to minted URLs, and the transcript of what they said."""

import asyncio
import json

import httpx
import openai
import pytest

from recipe.multi_policy_async.gateway.client import AgentEndpoints
from recipe.multi_policy_async.workflows.agents import Agents
from recipe.multi_policy_async.workflows.base import Task
from recipe.multi_policy_async.workflows.failures import describe, is_infrastructure
from recipe.multi_policy_async.workflows.transcript import Transcripts

GATEWAY = "http://127.0.0.1:8000/"
TASK = Task(4, {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}})


def _endpoints(agent: str) -> AgentEndpoints:
    url = f"{GATEWAY}w/token/agents/{agent}"
    return AgentEndpoints(agent, f"{agent}_model", f"{url}/v1", url)


def _completion(request: httpx.Request) -> httpx.Response:
    sent = json.loads(request.content)
    text = f"{sent['model']} heard {sent['messages'][-1]['content']}"
    return httpx.Response(
        200,
        json={
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": sent["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "metadata": {"policy_version": ["0.3", "0.3"]},
        },
    )


def _talk(handler, scenario, transcripts=None):
    async def run():
        hooks = {"response": [transcripts.on_response]} if transcripts else {}
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), event_hooks=hooks) as http:
            return await scenario(Agents({a: _endpoints(a) for a in ("planner", "solver")}, http, 5.0))

    return asyncio.run(run())


def test_an_agent_speaks_to_its_own_url_as_its_own_model():
    seen = []

    def handler(request):
        seen.append((str(request.url), json.loads(request.content).get("temperature")))
        return _completion(request)

    async def scenario(agents):
        return await agents["solver"].chat([{"role": "user", "content": "hello"}], temperature=0.5)

    assert _talk(handler, scenario) == "solver_model heard hello"
    assert seen == [(f"{GATEWAY}w/token/agents/solver/v1/chat/completions", 0.5)]


def test_frameworks_get_the_urls_and_the_client():
    async def scenario(agents):
        agent = agents["planner"]
        return agent.base_url, agent.anthropic_base_url, agent.model, agent.client is agent.client

    url = f"{GATEWAY}w/token/agents/planner"
    assert _talk(_completion, scenario) == (f"{url}/v1", url, "planner_model", True)


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_an_unknown_agent_is_an_error_that_names_the_known_ones(kind):
    async def scenario(agents):
        with pytest.raises(kind, match="unknown agent 'verifier'; agent_model_mapping names planner, solver"):
            agents["verifier"]
        return list(agents), len(agents)

    assert _talk(_completion, scenario) == (["planner", "solver"], 2)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "invalid_request", False),
        (404, "agent_not_found", False),
        (408, None, True),
        (409, "workflow_closed", False),
        (429, "model_paused", True),
        (429, "too_many_workflows", True),
        (400, "too_many_calls", False),
        (503, "model_unavailable", True),
        (None, None, True),
    ],
)
def test_a_gateway_that_cannot_serve_is_infrastructure_and_a_refused_request_is_not(status, code, expected):
    def handler(request):
        if status is None:
            raise httpx.ConnectError("refused", request=request)
        body = {"error": {"message": "no", "code": code}}
        return httpx.Response(status, json=body, headers={"x-should-retry": "false"})

    async def scenario(agents):
        agents["planner"].client.max_retries = 0
        try:
            await agents["planner"].chat([{"role": "user", "content": "x"}])
        except Exception as error:
            wrapped = RuntimeError("my framework failed")
            wrapped.__cause__ = error
            return [is_infrastructure(each, GATEWAY) for each in (error, wrapped, ExceptionGroup("all", [wrapped]))], (
                is_infrastructure(error, "http://another:1/")
            )

    assert _talk(handler, scenario) == ([expected] * 3, False)


def test_an_error_is_told_in_one_line():
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(ValueError("cut \ud83d")) == "ValueError: cut ?", "it can be sent"


def test_watched_workflows_leave_messages_answers_and_versions(tmp_path):
    transcripts = Transcripts(tmp_path / "run" / "episodes.jsonl", every=2)

    async def scenario(agents):
        for _ in range(3):
            transcripts.watch("token")
            await agents["planner"].chat([{"role": "user", "content": "2 + 2?"}])
            transcripts.write("token", TASK, {"workflow_id": "e0-t4-s0-a0", "score": 1.0})

    _talk(_completion, scenario, transcripts)
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert (lines[0]["question"], lines[0]["ground_truth"], lines[0]["score"]) == ("2 + 2?", "4", 1.0)
    (call,) = lines[0]["calls"]
    assert call["agent"] == "planner" and call["messages"] == [{"role": "user", "content": "2 + 2?"}]
    assert call["answer"][0]["content"] == "planner_model heard 2 + 2?"
    assert call["metadata"] == {"policy_version": ["0.3", "0.3"]}


def test_images_are_noted_and_not_written_down(tmp_path):
    transcripts = Transcripts(tmp_path / "episodes.jsonl", every=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def scenario(agents):
        transcripts.watch("token")
        await agents["planner"].chat([{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}])
        transcripts.write("token", TASK, {})

    _talk(_completion, scenario, transcripts)
    written = (tmp_path / "episodes.jsonl").read_text()
    assert "(an image)" in written and "what?" in written and "base64" not in written.split('"answer"')[0]


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("task", "episode"),
    [
        (Task(1, {"prompt": [{"role": "system", "content": "x"}]}), {}),
        (TASK, {"info": Unprintable()}),
        (TASK, {"info": "cut \ud83d"}),
    ],
)
def test_an_episode_that_cannot_be_written_is_counted_and_harms_nobody(tmp_path, task, episode):
    transcripts = Transcripts(tmp_path / "episodes.jsonl", every=1)
    transcripts.watch("token")
    transcripts.write("token", task, episode)
    assert transcripts.lost == 1


def test_a_path_that_cannot_be_written_harms_nobody(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    transcripts = Transcripts(tmp_path / "run" / "episodes.jsonl", every=1)
    transcripts.watch("token")
    transcripts.write("token", TASK, {})
    assert transcripts.lost == 1


def test_an_answer_of_another_shape_is_left_out_of_the_transcript_and_reaches_its_reader(tmp_path):
    def handler(request):
        return httpx.Response(400, json=["no"])

    transcripts = Transcripts(tmp_path / "episodes.jsonl", every=1)

    async def scenario(agents):
        transcripts.watch("token")
        with pytest.raises(openai.BadRequestError):
            await agents["planner"].chat([{"role": "user", "content": "x"}])

    _talk(handler, scenario, transcripts)


def test_a_stream_reaches_its_reader_although_the_workflow_is_watched(tmp_path):
    def handler(request):
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"data: [DONE]\n\n")

    transcripts = Transcripts(tmp_path / "episodes.jsonl", every=1)

    async def scenario(agents):
        transcripts.watch("token")
        stream = await agents["planner"].client.chat.completions.create(model="m", messages=[], stream=True)
        return [chunk async for chunk in stream]

    assert _talk(handler, scenario, transcripts) == []
