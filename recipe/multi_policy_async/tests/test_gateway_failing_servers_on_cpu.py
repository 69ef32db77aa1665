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
"""While a model's servers fail, refuse, or give way to others: what clients see, and what is captured."""

import asyncio

import openai
import pytest

from ..gateway_binding_registry import ModelState
from ..trajectory import Version
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, ask, binding, one_model, until

W = "e0-t0-s0-a0"


@pytest.mark.parametrize("fault", [0, 500, 502, 503])
def test_a_server_that_fails_once_is_asked_again_under_a_new_rid(folder, texts, fault):
    async def run():
        engine = FakeEngine(lambda prompt: (ended_before.extend(engine.aborted), texts.ids("plan"))[1], faults=[fault])
        async with one_model(folder, engine) as world:
            text = await ask(world.client((await world.open(W))["planner"]))
            await world.control.finalize(W, rewards=1.0)
            return text, engine, world.sink.rows

    ended_before: list[str] = []

    text, engine, rows = asyncio.run(run())
    assert text == "plan" and len(rows) == 1
    first, second = engine.requests
    assert (first["rid"], second["rid"]) == (f"{W}:planner:0#0", f"{W}:planner:0#1")
    assert engine.aborted == [first["rid"]] == ended_before  # the old attempt is ended before the next one starts


def test_a_call_that_nobody_waits_for_is_ended_at_every_replica(folder, texts):
    async def run():
        first, second = FakeEngine(texts.says(ALPHABET), token_s=0.02), FakeEngine(texts.says("unused"))
        async with one_model(folder, first, retry_grace_s=0.0) as world:
            urls = [first.url, await second.start()]
            await world.router.bind(binding("planner_model", folder, first.url, replica_urls=urls))
            call = asyncio.create_task(ask(world.client((await world.open(W))["planner"])))
            await until(lambda: first.running)
            call.cancel()
            await until(lambda: first.aborted and second.aborted)
            await second.stop()
            return first.aborted, second.aborted

    assert asyncio.run(run()) == ([f"{W}:planner:0#0"], [f"{W}:planner:0#0"])


def test_an_answer_cut_in_its_middle_is_sampled_again_from_the_prompt(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), cut_after=[7])
        async with one_model(folder, engine) as world:
            text = await ask(world.client((await world.open(W))["planner"]), stop=["never"])
            await world.control.finalize(W, rewards=1.0)
            return text, engine, world.sink.rows

    text, engine, [row] = asyncio.run(run())
    assert text == ALPHABET and row.response_ids.tolist() == texts.ids(ALPHABET)
    assert engine.requests[1]["input_ids"] == engine.requests[0]["input_ids"]


def test_a_stream_whose_server_dies_in_its_middle_ends_with_an_error_and_is_counted_as_the_policys_fault(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), cut_after=[7])
        async with one_model(folder, engine) as world:
            with pytest.raises(openai.APIError, match="cannot be completed"):
                await ask(world.client((await world.open(W))["planner"]), stream=True)
            return (await world.control.finalize(W, rewards=1.0))["calls"], len(engine.requests)

    assert asyncio.run(run()) == ({"abandoned(policy_down)": 1}, 1)


def test_a_dead_server_is_a_503_after_the_bounded_retry_and_the_session_stays_usable(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("plan"), faults=[500, 500, -1, -1], cut_after=[2, 2])
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(client)
            with pytest.raises(openai.InternalServerError):
                await ask(client, stop=["never"])  # dies in the middle of both attempts
            text = await ask(client)
            final = await world.control.finalize(W, rewards=1.0)
            return (
                caught.value,
                text,
                final["calls"],
                world.metric("requests_total", model="planner_model", status="503"),
            )

    error, text, calls, counted = asyncio.run(run())
    assert error.status_code == 503 and error.code == "model_unavailable"
    assert text == "plan" and calls == {"kept": 1, "abandoned(policy_down)": 2}
    assert counted == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_server_is_the_clients_400_and_is_not_tried_again(folder, texts, stream):
    async def run():
        engine = FakeEngine(texts.says("plan"), faults=[400])
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"], max_retries=3)
            with pytest.raises(openai.BadRequestError, match="refuse"):
                await ask(client, stream=stream)
            return len(engine.requests), await ask(client)

    assert asyncio.run(run()) == (1, "plan")


def test_an_unstamped_answer_of_a_policy_in_training_is_never_a_row(folder, texts):  # invariant 5
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"), version="default")) as world:
            with pytest.raises(openai.InternalServerError, match="stamped"):
                await ask(world.client((await world.open(W))["planner"]))
            await world.control.finalize(W, rewards=1.0)
            return world.sink.rows

    assert asyncio.run(run()) == []


def test_a_frozen_models_answer_needs_no_stamp(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("plan"), version="default")
        async with one_model(folder, engine, bindings={"planner_model": {"trained": False}}) as world:
            text = await ask(world.client((await world.open(W))["planner"]))
            await world.control.finalize(W, rewards=None)
            return text, world.sink.rows[0]

    text, row = asyncio.run(run())
    assert text == "plan" and row.version_span.oldest == Version(0, 0) and row.reward is None


def test_binding_again_after_a_restore_serves_the_new_servers(folder, texts):
    async def run():
        old, new = FakeEngine(texts.says("old")), FakeEngine(texts.says("new"), version="1.1")
        async with one_model(folder, old) as world:
            client = world.client((await world.open(W))["planner"])
            first = await ask(client)
            await new.start()
            await world.set_state("planner_model", ModelState.DOWN)
            from .fakes.gateway_world import binding

            await world.router.bind(binding("planner_model", folder, new.url, incarnation=1))
            await world.set_state("planner_model", ModelState.OPEN, Version(1, 1))
            second = await ask(client)
            await new.stop()
            return first, second

    assert asyncio.run(run()) == ("old", "new")


@pytest.mark.parametrize("asked", [{}, {"stop": ["xyz"]}, {"stream": True}])
def test_a_call_at_servers_that_others_took_over_from_starts_again_or_ends(folder, texts, asked):  # invariant 10
    async def run():
        old, new = FakeEngine(texts.says(ALPHABET), token_s=0.02), FakeEngine(texts.says("new"), version="1.1")
        async with one_model(folder, old) as world:
            client = world.client((await world.open(W))["planner"])
            running = asyncio.create_task(ask(client, **asked))
            await until(lambda: old.running)
            await asyncio.sleep(0.1)
            await new.start()
            await world.set_state("planner_model", ModelState.STARTING)
            await world.router.bind(binding("planner_model", folder, new.url, incarnation=1))
            await world.set_state("planner_model", ModelState.OPEN, Version(1, 1))
            [answer] = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 5)
            await until(lambda: not old.running)
            await world.control.finalize(W, rewards=1.0)
            await new.stop()
            return answer, [row.response_ids.tolist() for row in world.sink.rows]

    answer, rows = asyncio.run(run())
    if "stream" in asked:  # the client has seen a part
        assert "cannot be completed" in str(answer) and rows == []
    else:
        assert (answer, rows) == ("new", [texts.ids("new")])
