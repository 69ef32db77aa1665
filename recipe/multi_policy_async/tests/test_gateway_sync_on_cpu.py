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
"""While a model syncs or is not open: what clients see, and what is captured."""

import asyncio

import openai
import pytest

from ..gateway.gate import ModelGate
from ..gateway.metrics import GatewayMetrics
from ..gateway_binding_registry import ModelState
from ..trajectory import Version
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, World, ask, gateway_world, one_model, until

W = "e0-t0-s0-a0"


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
