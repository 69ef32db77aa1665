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
"""Retries, siblings and leavers: who gets which answer, and what becomes of those that nobody got."""

import asyncio
import json

import pytest

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, one_model, slow, until
from .fakes.raw_agent import BODY, RETRY, RawAgent

W = "e0-t0-s0-a0"


def test_a_marked_retry_joins_the_running_call_from_its_first_token(folder, texts):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            await agent.leave(0.05)
            answer = (await agent.post(headers=RETRY)).json()
            final = await world.control.finalize(W, rewards=1.0)
            return answer, final, engine, world.sink.rows

    answer, final, engine, rows = asyncio.run(run())
    assert answer["choices"][0]["message"]["content"] == ALPHABET
    assert len(engine.requests) == 1 and engine.aborted == []  # nothing was sampled twice (invariant 2)
    assert final["calls"] == {"kept": 1} and len(rows) == 1


def test_a_marked_retry_gets_an_answer_that_ended_while_the_client_was_away(folder, texts):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            await agent.leave(0.05)
            await until(lambda: engine.rows)
            answer = await agent.post(headers=RETRY)
            return answer.json(), (await world.control.finalize(W, rewards=1.0))["calls"], len(engine.requests)

    answer, calls, requests = asyncio.run(run())
    assert answer["choices"][0]["message"]["content"] == ALPHABET
    assert (calls, requests) == ({"kept": 1}, 1)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["xyz"], "logprobs": True, "top_logprobs": 2}])
def test_a_stream_that_was_read_is_held_in_one_piece_which_says_the_same_to_a_retry(folder, texts, more):
    body = {**BODY, "stream": True, **more}

    def read(answer):
        """Text, log-probs and finish reason by choice, and how many chunks say so."""
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        said = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            text, log_probs, finish = said.get(choice["index"], ("", [], None))
            text += choice["delta"].get("content") or ""
            log_probs = log_probs + ((choice.get("logprobs") or {}).get("content") or [])
            said[choice["index"]] = (text, log_probs, choice["finish_reason"] or finish)
        return said, len(chunks)

    async def run():
        engine = FakeEngine(texts.says(ALPHABET))
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            first = read(await agent.post(body))
            [exchange] = world.gateway.sessions.find(W).exchanges
            held = len(exchange.events)
            again = read(await agent.post(body, headers=RETRY))
            return first, held, again, len(engine.requests)

    (said, chunks), held, (said_again, chunks_again), requests = asyncio.run(run())
    assert said == said_again and said[0][0] == ALPHABET.removesuffix("xyz" if "stop" in more else "")
    assert held == requests == more.get("n", 1)
    assert chunks_again == 2 * held < chunks


def test_an_equal_body_without_the_retry_mark_is_a_new_sibling(folder, texts):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            answers = await asyncio.gather(*(agent.post() for _ in range(3)))
            await world.control.finalize(W, rewards=1.0)
            return [answer.json()["id"] for answer in answers], len(engine.requests), world.sink.rows

    ids, requests, rows = asyncio.run(run())
    assert len(set(ids)) == requests == len(rows) == 3


def test_the_retry_of_a_refused_sibling_does_not_take_the_other_siblings_answer(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("plan"))
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            await agent.post()
            engine.faults = [500, 500]
            refused = await agent.post()
            again = await agent.post(headers=RETRY)
            await world.control.finalize(W, rewards=1.0)
            return refused.status_code, again.json()["id"], world.sink.rows

    status, retry_id, rows = asyncio.run(run())
    assert status == 503 and retry_id == f"chatcmpl-{W}:planner:2" and len(rows) == 2


def test_the_retry_of_a_sibling_that_left_while_it_was_held_does_not_take_the_other_siblings_answer(folder, texts):
    async def run():
        async with (
            one_model(folder, FakeEngine(texts.says("plan"))) as world,
            RawAgent((await world.open(W))["planner"]) as agent,
        ):
            await agent.post()
            session = world.gateway.sessions.find(W)
            session.pause()
            await agent.leave(0.3)
            await until(lambda: session.idle_s() > 0)  # the gateway saw it leave
            session.resume()
            return (await agent.post(headers=RETRY)).json()["id"]

    assert asyncio.run(run()) == f"chatcmpl-{W}:planner:1"


@pytest.mark.parametrize("ends", ["before", "after"])  # the grace for the retry, and the answer before or after it
def test_a_retry_that_comes_too_late_is_answered_anew_and_that_answer_is_trained(folder, texts, ends):
    async def run():
        engine = slow(texts)
        grace = {"before": 0.5, "after": 0.01}[ends]
        async with (
            one_model(folder, engine, retry_grace_s=grace) as world,
            RawAgent((await world.open(W))["planner"]) as agent,
        ):
            await agent.leave(0.05)
            [first] = world.gateway.sessions.find(W).exchanges
            await until(lambda: first.abandoned and first.ended)
            ended_well = first.error is None
            answer = await agent.post(headers=RETRY)
            final = await world.control.finalize(W, rewards=1.0)
            return ended_well, answer.json()["id"], final["calls"], world.sink.rows

    ended_well, answer_id, calls, [row] = asyncio.run(run())
    assert ended_well == (ends == "before")
    assert calls == {"abandoned(client_gone)": 1, "kept": 1}
    assert answer_id == f"chatcmpl-{row.metadata['calls'][0]['request_id']}"


def test_a_retry_that_comes_too_late_does_not_take_the_answer_of_a_sibling(folder, texts):
    async def run():
        async with (
            one_model(folder, slow(texts), retry_grace_s=0.3) as world,
            RawAgent((await world.open(W))["planner"]) as agent,
        ):
            await agent.leave(0.05)
            sibling = await agent.post()
            await until(lambda: world.gateway.sessions.find(W).exchanges[0].abandoned)
            again = await agent.post(headers=RETRY)
            await world.control.finalize(W, rewards=1.0)
            return {sibling.json()["id"], again.json()["id"]}, world.sink.rows

    ids, rows = asyncio.run(run())
    assert ids == {f"chatcmpl-{row.metadata['calls'][0]['request_id']}" for row in rows} and len(rows) == 2


def test_a_retry_of_an_answer_that_was_rewritten_meanwhile_is_answered_anew(folder, texts):
    async def run():
        async with (
            one_model(folder, FakeEngine(texts.says("plan"))) as world,
            RawAgent((await world.open(W))["planner"]) as agent,
        ):
            await agent.post()
            ask = BODY["messages"]
            edited = [*ask, {"role": "assistant", "content": "my plan"}, {"role": "user", "content": "go on"}]
            await agent.post({"messages": edited})
            again = await agent.post(headers=RETRY)
            await world.control.finalize(W, rewards=1.0)
            return again.json()["id"], world.sink.rows

    answer_id, rows = asyncio.run(run())
    assert answer_id in {f"chatcmpl-{call['request_id']}" for row in rows for call in row.metadata["calls"]}


def test_a_client_that_does_not_come_back_leaves_no_row_and_no_generation(folder, texts):
    async def run():
        engine = slow(texts)
        async with (
            one_model(folder, engine, retry_grace_s=0.02) as world,
            RawAgent((await world.open(W))["planner"]) as agent,
        ):
            await agent.leave(0.04)
            await until(lambda: engine.rows)
            final = await world.control.finalize(W, rewards=1.0)
            return engine, final, world.sink.records

    engine, final, [record] = asyncio.run(run())
    assert engine.aborted == [f"{W}:planner:0#0"] and engine.rows[0][2] == "abort"
    assert final["calls"] == {"abandoned(client_gone)": 1}
    assert (record.status, record.trajectories) == ("no_calls", ())  # invariant 4: still one terminal record


def test_a_client_that_leaves_a_stream_in_its_middle_leaves_no_half_row(folder, texts):  # invariant 9
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine, retry_grace_s=0.02) as world:
            client = world.client((await world.open(W))["planner"])
            stream = await client.chat.completions.create(**BODY, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content == "e":
                    break
            await stream.close()
            await until(lambda: engine.rows)
            return (await world.control.finalize(W, rewards=1.0))["calls"], world.sink.rows, engine.aborted

    calls, rows, aborted = asyncio.run(run())
    assert calls == {"abandoned(client_gone)": 1} and rows == [] and aborted == [f"{W}:planner:0#0"]


def test_a_client_that_leaves_while_its_request_waits_at_the_gate_leaves_nothing(folder, texts):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine, open_models=False, retry_grace_s=0.01) as world:
            async with RawAgent((await world.open(W))["planner"]) as agent:
                await agent.leave(0.05)
            await until(lambda: world.gateway.gates["planner_model"].waiting == 0)
            return engine.requests, (await world.control.finalize(W, rewards=1.0))["calls"]

    requests, calls = asyncio.run(run())
    assert requests == [] and calls in ({}, {"abandoned(client_gone)": 1})
