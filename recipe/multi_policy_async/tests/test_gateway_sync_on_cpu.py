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
"""While a model syncs, is down, or its servers fail: what clients see, and what is captured."""

import asyncio

import openai
import pytest

from ..gateway.gate import ModelGate
from ..gateway.metrics import GatewayMetrics
from ..gateway_binding_registry import ModelState
from ..trajectory import Version
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, World, binding, gateway_world, one_model, until

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


async def ask(client, *, stream=False, **kwargs):
    answer = await client.chat.completions.create(model="any", messages=ASK, stream=stream, **kwargs)
    if not stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


async def sync_weights(world: World, model_id: str, version: str) -> None:
    """What a weight sync does: gate, abort, new version, gate."""
    engine = world.engines[model_id]
    await world.set_state(model_id, ModelState.DRAINING)
    await world.set_state(model_id, ModelState.SYNCING)
    engine.abort_all()
    await until(lambda: not engine.running)
    engine.version = version
    await world.set_state(model_id, ModelState.OPEN, Version.parse(version))


def test_a_request_waits_while_its_model_syncs_and_the_other_model_does_not_notice(folder, texts):  # invariant 7
    async def run():
        engines = {"planner_model": FakeEngine(texts.says("plan")), "solver_model": FakeEngine(texts.says("42"))}
        async with gateway_world(folder, engines) as world:
            agents = await world.open(W)
            await world.set_state("planner_model", ModelState.SYNCING)
            waiting = asyncio.create_task(ask(world.client(agents["planner"])))
            other = await ask(world.client(agents["solver"]))
            await until(lambda: world.gateway.gates["planner_model"].waiting == 1)
            assert not waiting.done() and not engines["planner_model"].requests
            await world.set_state("planner_model", ModelState.OPEN)
            return other, await waiting, world.metric("hold_seconds_count", model="planner_model")

    assert asyncio.run(run()) == ("42", "plan", 1.0)


def test_whoever_runs_workflows_can_ask_which_of_them_wait_for_a_model_that_is_not_open(folder, texts):
    async def run():
        engines = {"planner_model": FakeEngine(texts.says("plan")), "solver_model": FakeEngine(texts.says("42"))}
        async with gateway_world(folder, engines) as world:
            agents, other = await world.open(W), await world.open("e0-t0-s1-a0")
            await world.set_state("planner_model", ModelState.SYNCING)
            waiting = asyncio.create_task(ask(world.client(agents["planner"])))
            await ask(world.client(other["solver"]))
            await until(lambda: world.gateway.gates["planner_model"].waiting == 1)
            answers = [await world.control.blocked(0), await world.control.blocked(60)]
            await world.set_state("planner_model", ModelState.OPEN)
            await waiting
            return [*answers, await world.control.blocked(0)]

    assert asyncio.run(run()) == [{W: "planner_model"}, {}, {}]


def test_a_model_that_is_not_bound_yet_holds_its_first_requests(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan")), open_models=False) as world:
            waiting = asyncio.create_task(ask(world.client((await world.open(W))["planner"])))
            await until(lambda: world.gateway.gates["planner_model"].waiting == 1)
            await world.set_state("planner_model", ModelState.OPEN)
            return await waiting

    assert asyncio.run(run()) == "plan"


def test_a_hold_past_its_bound_is_a_429_with_retry_after_and_the_sdk_then_succeeds(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan")), hold_timeout_s=0.05, retry_after_s=1) as world:
            agents = await world.open(W)
            await world.set_state("planner_model", ModelState.SYNCING)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(world.client(agents["planner"]))
            retrying = asyncio.create_task(ask(world.client(agents["planner"], max_retries=2)))
            await asyncio.sleep(0.3)
            await world.set_state("planner_model", ModelState.OPEN)
            text = await retrying
            await world.control.finalize(W, rewards=1.0)
            return caught.value, text, len(world.sink.rows)

    error, text, rows = asyncio.run(run())
    assert error.response.headers["retry-after"] == "1" and error.code == "model_paused"
    assert (text, rows) == ("plan", 1)


def test_a_model_that_is_down_fails_at_once_and_wakes_those_who_wait(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            client = world.client((await world.open(W))["planner"])
            await world.set_state("planner_model", ModelState.SYNCING)
            waiting = asyncio.create_task(ask(client))
            await until(lambda: world.gateway.gates["planner_model"].waiting == 1)
            await world.set_state("planner_model", ModelState.DOWN)
            for request in (waiting, ask(client)):
                with pytest.raises(openai.InternalServerError) as caught:
                    await request
                assert caught.value.status_code == 503 and caught.value.code == "model_unavailable"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_call_goes_on_where_it_was_cut_and_each_token_keeps_its_version(folder, texts, stream):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"])
            call = asyncio.create_task(ask(client, stream=stream))
            await until(lambda: engine.running)
            await asyncio.sleep(0.03)
            await sync_weights(world, "planner_model", "0.2")
            text = await call
            final = await world.control.finalize(W, rewards=1.0)
            return world, engine, text, final

    world, engine, text, final = asyncio.run(run())
    assert text == ALPHABET
    [row] = world.sink.rows
    assert row.response_ids.tolist() == texts.ids(ALPHABET)
    (_, first, kind), (_, second, _) = engine.rows
    assert kind == "abort" and 0 < len(first) < 26
    assert row.versions.tolist() == [1] * len(first) + [2] * len(second)  # invariant 5
    assert [request["rid"] for request in engine.requests] == [f"{W}:planner:0#0", f"{W}:planner:0#1"]
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 64 - len(first)
    assert final["trajectories"][0]["policy_version"] == ["0.1", "0.2"]
    assert (row.metadata["calls"][0]["attempts"], row.metadata["calls"][0]["resumes"]) == (2, 1)
    assert world.metric("in_flight_at_pause", model="planner_model") == 1


def test_a_call_lives_through_several_syncs(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        async with one_model(folder, engine) as world:
            call = asyncio.create_task(ask(world.client((await world.open(W))["planner"])))
            for version in ("0.2", "0.3", "0.4"):
                await until(lambda: engine.running)
                await asyncio.sleep(0.015)
                await sync_weights(world, "planner_model", version)
            text = await call
            await world.control.finalize(W, rewards=1.0)
            return text, world.sink.rows[0]

    text, row = asyncio.run(run())
    assert text == ALPHABET and row.response_ids.tolist() == texts.ids(ALPHABET)
    assert row.metadata["calls"][0]["resumes"] == 3 and row.versions.tolist() == sorted(row.versions.tolist())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_characters_over_which_syncs_cut_are_read_as_if_nothing_had_happened(folder, texts, stream):
    async def run():
        engine = FakeEngine(texts.says("€😀€😀END and more"), token_s=0.01)
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"])
            call = asyncio.create_task(ask(client, stream=stream, stop=["END"]))
            for number in range(2, 7):
                await asyncio.sleep(0.025)
                await sync_weights(world, "planner_model", f"0.{number}")
            text = await call
            await world.control.finalize(W, rewards=1.0)
            return text, world.sink.rows

    text, [row] = asyncio.run(run())
    assert text == "€😀€😀" and row.response_ids.tolist() == texts.ids("€😀€😀END", end=False)
    assert row.metadata["calls"][0]["resumes"] >= 3


@pytest.mark.parametrize("how", ["no_partial_rollout", "penalty"])
def test_a_call_that_cannot_be_resumed_starts_again_when_the_client_has_seen_nothing(folder, texts, how):
    changes = {"partial_rollout": False} if how == "no_partial_rollout" else {"sampling": {"frequency_penalty": 0.5}}

    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        async with one_model(folder, engine, bindings={"planner_model": changes}) as world:
            call = asyncio.create_task(ask(world.client((await world.open(W))["planner"])))
            await until(lambda: engine.running)
            await asyncio.sleep(0.03)
            await sync_weights(world, "planner_model", "0.2")
            text = await call
            await world.control.finalize(W, rewards=1.0)
            lost = world.metric("sampled_tokens_total", model="planner_model", outcome="superseded")
            return text, world.sink.rows[0], len(engine.rows[0][1]), lost

    text, row, cut, lost = asyncio.run(run())
    assert text == ALPHABET and set(row.versions.tolist()) == {2}
    assert lost == cut > 0


def test_a_streamed_call_that_cannot_be_resumed_ends_with_an_error_and_no_row(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        async with one_model(folder, engine, bindings={"planner_model": {"partial_rollout": False}}) as world:
            call = asyncio.create_task(ask(world.client((await world.open(W))["planner"]), stream=True))
            await until(lambda: engine.running)
            await asyncio.sleep(0.04)
            await sync_weights(world, "planner_model", "0.2")
            with pytest.raises(openai.APIError, match="cut"):
                await call
            return (await world.control.finalize(W, rewards=1.0))["calls"], world.sink.rows

    calls, rows = asyncio.run(run())
    assert calls == {"abandoned(superseded)": 1} and rows == []


def test_tokens_of_two_incarnations_never_share_a_row(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        async with one_model(folder, engine) as world:
            call = asyncio.create_task(ask(world.client((await world.open(W))["planner"])))
            await until(lambda: engine.running)
            await asyncio.sleep(0.03)
            await sync_weights(world, "planner_model", "1.0")
            text = await call
            await world.control.finalize(W, rewards=1.0)
            return text, world.sink.rows[0]

    text, row = asyncio.run(run())
    assert text == ALPHABET and row.response_ids.tolist() == texts.ids(ALPHABET)
    assert row.incarnation == 1 and set(row.versions.tolist()) == {0}


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


def test_draining_waits_for_calls_that_could_not_be_resumed_and_lets_no_new_one_pass(folder, texts):
    async def run(timeout_s):
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.004)
        changes = {"planner_model": {"partial_rollout": False}}
        async with one_model(folder, engine, bindings=changes, drain_timeout_s=timeout_s) as world:
            client = world.client((await world.open(W))["planner"])
            running = asyncio.create_task(ask(client, stream=True))
            await until(lambda: engine.running)
            draining = asyncio.create_task(world.router.drain("planner_model"))
            await asyncio.sleep(0.01)
            held = asyncio.create_task(ask(client))
            left = await draining
            requests = len(engine.requests)
            await sync_weights(world, "planner_model", "0.2")
            return left, requests, await asyncio.gather(running, held, return_exceptions=True)

    assert asyncio.run(run(5.0)) == (0, 1, [ALPHABET, ALPHABET])
    left, requests, (cut, held) = asyncio.run(run(0.02))
    assert (left, requests, held) == (1, 1, ALPHABET) and isinstance(cut, openai.APIError)


def test_every_pause_is_measured_attempts_in_flight_their_drain_and_the_time_to_the_opening():
    metrics = GatewayMetrics()
    gate = ModelGate("m", hold_timeout_s=1, retry_after_s=1, metrics=metrics)

    def measured():
        names = ("in_flight_at_pause", "drain_seconds_count", "pause_seconds_count")
        return [metrics.registry.get_sample_value(f"gateway_{name}", {"model": "m"}) or 0 for name in names]

    async def run():
        gate.set_state(ModelState.OPEN)
        with gate.attempt(resumable=True), gate.attempt(resumable=False):
            gate.set_state(ModelState.DRAINING)
            gate.set_state(ModelState.SYNCING)
            assert measured() == [2, 0, 0]
        assert measured() == [2, 1, 0]
        gate.set_state(ModelState.OPEN)
        assert measured() == [2, 1, 1]
        gate.set_state(ModelState.SYNCING)  # nothing runs: drained at once
        gate.set_state(ModelState.OPEN)
        assert measured() == [0, 2, 2]

    asyncio.run(run())
