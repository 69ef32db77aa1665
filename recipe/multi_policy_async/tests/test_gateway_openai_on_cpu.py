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
"""The real openai client against the real gateway, over loopback: what it gets, and what is captured."""

import asyncio
import sys

import numpy as np
import openai
import pytest

from .fakes.fake_engine import FakeEngine, log_prob_of
from .fakes.gateway_world import Texts, gateway_world

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


def engines(texts: Texts, planner: str = "Plan: größer 😀", solver: str = "42") -> dict[str, FakeEngine]:
    return {"planner_model": FakeEngine(texts.says(planner)), "solver_model": FakeEngine(texts.says(solver))}


async def streamed(client, **kwargs):
    chunks = [c async for c in await client.chat.completions.create(model="any", messages=ASK, stream=True, **kwargs)]
    return chunks, "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_each_agent_reaches_its_own_model_and_its_tokens_are_captured_exactly(folder, texts):  # invariant 1
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            agents = await world.open(W)
            planner, solver = world.client(agents["planner"]), world.client(agents["solver"])
            plan = await planner.chat.completions.create(model="any", messages=ASK)
            ask = [{"role": "user", "content": plan.choices[0].message.content}]
            answer = await solver.chat.completions.create(model="any", messages=ask)
            final = await world.control.finalize(W, rewards={"planner": 0.25, "solver": 1.0}, score=0.5)
            return world, plan, answer, final

    world, plan, answer, final = asyncio.run(run())
    assert plan.choices[0].message.content == "Plan: größer 😀"
    assert answer.choices[0].message.content == "42"
    assert final["accepted"] == {"planner_model": 1, "solver_model": 1}
    [record] = world.sink.records
    assert (record.workflow_id, record.status, record.score) == (W, "ok", 0.5)
    planned, solved = record.trajectories
    assert (planned.agent_id, planned.model_id, planned.reward) == ("planner", "planner_model", 0.25)
    assert (solved.agent_id, solved.model_id, solved.reward) == ("solver", "solver_model", 1.0)
    for row, asked, said in ((planned, "hello", "Plan: größer 😀"), (solved, "Plan: größer 😀", "42")):
        assert row.prompt_ids.tolist() == texts.prompt(asked)
        assert row.response_ids.tolist() == texts.ids(said)
        assert row.response_mask.tolist() == [1] * len(row.response_ids)
        assert np.array_equal(row.log_probs, np.float32([log_prob_of(i) for i in row.response_ids]))
        assert row.versions.tolist() == [1] * len(row.response_ids)
    assert {m: [str(v) for v in s] for m, s in record.version_vector.items()} == {
        "planner_model": ["0.1", "0.1"],
        "solver_model": ["0.1", "0.1"],
    }


def test_a_response_says_where_it_came_from(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            client = world.client((await world.open(W))["solver"])
            raw = await client.chat.completions.with_raw_response.create(model="any", messages=ASK)
            chunks, _ = await streamed(client)
            return raw.headers, raw.parse(), chunks

    headers, body, chunks = asyncio.run(run())
    assert body.metadata == {
        "workflow_id": W,
        "agent_id": "solver",
        "model_id": "solver_model",
        "request_id": f"{W}:solver:0",
        "policy_version": ["0.1", "0.1"],
    }
    assert body.model == "solver_model" and body.usage.total_tokens == body.usage.prompt_tokens + 3
    assert headers["x-workflow-id"] == W and headers["x-policy-version"] == "0.1,0.1"
    assert headers["x-request-id"] == f"{W}:solver:0"
    assert chunks[-1].metadata["request_id"] == f"{W}:solver:1"
    assert chunks[-1].metadata["policy_version"] == ["0.1", "0.1"]


def test_a_stream_has_the_shape_clients_expect_and_the_same_ids_are_captured(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            client = world.client((await world.open(W))["planner"])
            whole = await client.chat.completions.create(model="any", messages=ASK)
            chunks, text = await streamed(client, stream_options={"include_usage": True})
            await world.control.finalize(W, rewards=1.0)
            return world, whole, chunks, text

    world, whole, chunks, text = asyncio.run(run())
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(texts.ids("Plan: größer 😀"))
    assert len({chunk.id for chunk in chunks}) == 1
    first, second = world.sink.rows
    assert first.response_ids.tolist() == second.response_ids.tolist()
    assert np.array_equal(first.log_probs, second.log_probs)


def test_tokens_are_streamed_as_they_are_sampled_not_replayed_at_the_end(folder, texts):
    async def run():
        slow = {"planner_model": FakeEngine(texts.says("abcdefgh"), token_s=0.02)}
        async with gateway_world(folder, slow, mapping={"planner": "planner_model"}) as world:
            client = world.client((await world.open(W))["planner"])
            stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
            seen_while_running = 0
            async for chunk in stream:
                if chunk.choices[0].delta.content and world.engines["planner_model"].running:
                    seen_while_running += 1
            return seen_while_running

    assert asyncio.run(run()) >= 4


def test_no_piece_of_a_stream_shows_half_a_character(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts, planner="€😀ß" * 4)) as world:
            return await streamed(world.client((await world.open(W))["planner"]))

    chunks, text = asyncio.run(run())
    assert text == "€😀ß" * 4
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_row_ends_with_the_token_that_completed_it(folder, texts, stream):
    async def run():
        async with gateway_world(folder, engines(texts, planner="yes END and more")) as world:
            client = world.client((await world.open(W))["planner"])
            if stream:
                chunks, text = await streamed(client, stop=["END"])
                finish = [c.choices[0].finish_reason for c in chunks][-1]
            else:
                answer = await client.chat.completions.create(model="any", messages=ASK, stop=["END"])
                text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            await world.control.finalize(W, rewards=1.0)
            return world, text, finish

    world, text, finish = asyncio.run(run())
    assert (text, finish) == ("yes ", "stop")
    assert world.sink.rows[0].response_ids.tolist() == texts.ids("yes END", end=False)
    assert "stop" not in world.engines["planner_model"].requests[0]["sampling_params"]


def test_a_control_token_given_as_a_stop_string_ends_the_answer_though_it_has_no_text(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts, planner="yes<|im_start|>user and more")) as world:
            client = world.client((await world.open(W))["planner"])
            answer = await client.chat.completions.create(model="any", messages=ASK, stop=["<|im_start|>", "END"])
            await world.control.finalize(W, rewards=1.0)
            return answer.choices[0], world.sink.rows[0]

    choice, row = asyncio.run(run())
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
    assert row.response_ids.tolist() == texts.ids("yes<|im_start|>", end=False)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_clients_budget_is_honoured_up_to_the_response_length(folder, texts, name):
    async def run():
        async with gateway_world(folder, engines(texts, planner="x" * 100)) as world:
            client = world.client((await world.open(W))["planner"])
            short = await client.chat.completions.create(model="any", messages=ASK, **{name: 5})
            cut = await client.chat.completions.create(model="any", messages=ASK, **{name: 100_000})
            await world.control.finalize(W, rewards=1.0)
            return world, short, cut

    world, short, cut = asyncio.run(run())
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 64)
    assert [len(row.response_ids) for row in world.sink.rows] == [5, 64]
    assert world.sink.rows[0].metadata["truncated"] is True


def test_log_probs_of_the_sampled_tokens_reach_the_client_both_ways(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            client = world.client((await world.open(W))["solver"])
            whole = await client.chat.completions.create(model="any", messages=ASK, logprobs=True, top_logprobs=2)
            chunks, _ = await streamed(client, logprobs=True)
            return whole.choices[0].logprobs.content, [
                entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
            ]

    whole, pieces = asyncio.run(run())
    expected = [log_prob_of(i) for i in texts.ids("42")]
    assert [entry.logprob for entry in whole] == expected == [entry.logprob for entry in pieces]
    assert [entry.token for entry in whole] == ["4", "2", "<|im_end|>"]
    assert [len(entry.top_logprobs) for entry in whole] == [2, 2, 2]


def test_log_probs_of_a_character_split_over_tokens_hold_its_bytes(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts, planner="a😀")) as world:
            client = world.client((await world.open(W))["planner"])
            whole = await client.chat.completions.create(model="any", messages=ASK, logprobs=True)
            legacy = await client.completions.create(model="any", prompt="x", logprobs=0)
            return whole.choices[0].logprobs.content, legacy.choices[0].logprobs

    entries, legacy = asyncio.run(run())
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "a😀<|im_end|>"
    assert (
        [entry.token for entry in entries] == ["a", r"\xf0", r"\x9f", r"\x98", r"\x80", "<|im_end|>"] == legacy.tokens
    )
    assert legacy.text_offset == [0, 1, 1, 1, 1, 2]


def test_the_synchronous_client_works_too(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            url = (await world.open(W))["solver"].openai_base_url

            def ask():
                with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                    pieces = client.chat.completions.create(model="any", messages=ASK, stream=True)
                    streamed_text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
                    whole = client.chat.completions.create(model="any", messages=ASK)
                    return streamed_text, whole.choices[0].message.content, [m.id for m in client.models.list()]

            return await asyncio.to_thread(ask)

    assert asyncio.run(run()) == ("42", "42", ["solver_model"])


def test_concurrent_agents_of_many_workflows_never_get_each_others_answers(folder, texts):
    async def one(world, sample):
        workflow_id = f"e0-t0-s{sample}-a0"
        agents = await world.open(workflow_id)
        for agent in ("planner", "solver", "checker"):
            ask = f"{workflow_id} {agent}"
            client = world.client(agents[agent])
            answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": ask}])
            prompt = texts.prompt(ask)
            assert answer.choices[0].message.content == f"{sum(prompt) % 9973}:{len(prompt)}"
        return await world.control.finalize(workflow_id, rewards=float(sample))

    async def run():
        fakes = {"planner_model": FakeEngine(texts.echoes()), "solver_model": FakeEngine(texts.echoes())}
        async with gateway_world(folder, fakes) as world:
            finals = await asyncio.gather(*(one(world, sample) for sample in range(12)))
            return world, finals

    world, finals = asyncio.run(run())
    assert all(final["accepted"] == {"planner_model": 1, "solver_model": 2} for final in finals)
    for row in world.sink.rows:
        asked = f"{row.workflow_id} {row.agent_id}"
        assert row.prompt_ids.tolist() == texts.prompt(asked)
        assert row.reward == float(row.workflow_id.split("-s")[1].split("-")[0])


def test_headers_with_the_control_key_name_the_agent_as_well_as_the_url_does(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            await world.open(W)
            headers = {"x-workflow-id": W, "x-agent-id": "solver"}
            async with openai.AsyncOpenAI(
                base_url=f"{world.base_url}/v1", api_key=world.router.control_key, default_headers=headers
            ) as client:
                answer = await client.chat.completions.create(model="any", messages=ASK)
            async with openai.AsyncOpenAI(
                base_url=f"{world.base_url}/v1", api_key="wrong", default_headers=headers
            ) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="any", messages=ASK)
            return answer

    assert asyncio.run(run()).metadata["agent_id"] == "solver"


def test_the_agents_model_is_listed_and_retrieved_and_any_other_is_a_404_that_names_it(folder, texts):
    async def run():
        async with gateway_world(folder, engines(texts)) as world:
            client = world.client((await world.open(W))["planner"])
            listed, one = await client.models.list(), await client.models.retrieve("planner_model")
            for other in ("solver_model", "Qwen/Qwen3-8B"):
                with pytest.raises(openai.NotFoundError, match="known are .*planner_model") as caught:
                    await client.models.retrieve(other)
                assert other in caught.value.body["message"]
            return listed.data, one

    listed, one = asyncio.run(run())
    assert listed == [one] and (one.id, one.object) == ("planner_model", "model")


@pytest.mark.slow
def test_nothing_of_the_gateway_imports_torch():
    probe = (
        "import sys; import recipe.multi_policy_async.multi_model_gateway_router, "
        "recipe.multi_policy_async.gateway.client, recipe.multi_policy_async.gateway.router_process, "
        "recipe.multi_policy_async.gateway.sglang_upstream; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )

    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", probe)
        return await process.wait()

    assert asyncio.run(run()) == 0
