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
"""Workflows from creation to their terminal record: finalize, abort, bounds, and what stays of them."""

import asyncio
import gc
import time

import httpx
import openai
import pytest

from ..gateway.call import Call, Exchange
from ..gateway.client import ControlError
from ..gateway.session import WorkflowSession
from ..gateway_binding_registry import ModelState
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, one_model, slow, until
from .fakes.raw_agent import BODY, RawAgent

W = "e0-t0-s0-a0"


def test_creating_a_workflow_again_gives_the_same_urls_and_tokens_cannot_be_guessed(folder, texts):
    async def run():
        async with one_model(folder, slow(texts)) as world:
            first, again, other = await world.open(W), await world.open(W), await world.open("e0-t0-s1-a0")
            with pytest.raises(ControlError, match="open for train"):
                await world.open(W, purpose="eval")
            return first, again, other

    first, again, other = asyncio.run(run())
    assert first == again and first["planner"].openai_base_url != other["planner"].openai_base_url
    assert len(first["planner"].openai_base_url.split("/w/")[1].split("/")[0]) >= 32
    assert first["planner"].openai_base_url == first["planner"].anthropic_base_url + "/v1"


def test_finalize_waits_for_a_running_call_within_its_grace(folder, texts):
    async def run():
        async with one_model(folder, slow(texts), finalize_grace_s=5.0) as world:
            async with RawAgent((await world.open(W))["planner"]) as agent:
                running = asyncio.create_task(agent.post())
                await until(lambda: world.engines["planner_model"].running)
                final = await world.control.finalize(W, rewards=1.0)
                return final, (await running).status_code

    final, status = asyncio.run(run())
    assert final["accepted"] == {"planner_model": 1} and status == 200


def test_a_call_that_runs_past_the_grace_is_abandoned_as_late_and_ended_at_the_server(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.2)
        async with one_model(folder, engine, finalize_grace_s=0.02) as world:
            async with RawAgent((await world.open(W))["planner"]) as agent:
                running = asyncio.create_task(agent.post())
                await until(lambda: engine.running)
                final = await world.control.finalize(W, rewards=1.0)
                await until(lambda: engine.aborted)
                return final, (await running).status_code, world.sink.rows

    final, status, rows = asyncio.run(run())
    assert final["calls"] == {"abandoned(late)": 1} and rows == [] and status == 409


def test_a_call_after_finalize_gets_409_which_sdks_do_not_retry(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("plan"))
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"], max_retries=5)
            await client.chat.completions.create(**BODY)
            await world.control.finalize(W, rewards=1.0)
            with pytest.raises(openai.ConflictError, match="finalized"):
                await client.chat.completions.create(**BODY)
            named = {"x-workflow-id": W, "x-agent-id": "planner"}
            by_headers = {"base_url": f"{world.base_url}/v1", "api_key": world.router.control_key}
            async with openai.AsyncOpenAI(**by_headers, default_headers=named) as same_agent:
                with pytest.raises(openai.ConflictError, match="finalized"):
                    await same_agent.chat.completions.create(**BODY)
            with pytest.raises(ControlError, match="409"):
                await world.open(W)
            return len(engine.requests), world.metric("errors_total", code="workflow_closed")

    assert asyncio.run(run()) == (1, 3.0)


def test_finalizing_again_gives_the_first_answer_and_the_sink_sees_one_record(folder, texts):  # invariant 4
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            await world.client((await world.open(W))["planner"]).chat.completions.create(**BODY)
            both = await asyncio.gather(*(world.control.finalize(W, rewards=1.0) for _ in range(2)))
            later = await world.control.finalize(W, status="failed", rewards=0.0)
            aborted = await world.control.abort(W)
            return [*both, later, aborted], world.sink.records, await world.control.status(W)

    answers, records, status = asyncio.run(run())
    assert all(answer == answers[0] for answer in answers) and len(records) == 1
    assert status["state"] == "closed" and status["status"] == "ok"


def test_bad_rewards_are_told_and_finalize_can_be_tried_again(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            await world.client((await world.open(W))["planner"]).chat.completions.create(**BODY)
            for rewards in (None, {"solver": 1.0}, {"planner": None}):
                with pytest.raises(ControlError, match=rf"400.*{W}"):
                    await world.control.finalize(W, rewards=rewards)
            assert world.sink.records == []
            final = await world.control.finalize(W, rewards={f"{W}/planner/0": 0.5})
            return final, world.sink.rows

    final, rows = asyncio.run(run())
    assert final["status"] == "ok" and [row.reward for row in rows] == [0.5]


def test_a_reward_that_is_no_number_in_json_is_a_400(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            await world.client((await world.open(W))["planner"]).chat.completions.create(**BODY)
            async with httpx.AsyncClient(verify=False) as http:
                url = f"{world.base_url}/control/v1/workflows/{W}/finalize"
                key = {"authorization": f"Bearer {world.router.control_key}", "content-type": "application/json"}
                answers = [
                    await http.post(url, content=f'{{"rewards": {value}}}', headers=key)
                    for value in ("NaN", "Infinity", '"one"', "[[1]]")
                ]
            return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [400] * 4


def test_a_sink_that_fails_leaves_the_workflow_to_be_finalized_again_with_the_same_rows(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            client = world.client((await world.open(W))["planner"])
            await client.chat.completions.create(**BODY)
            world.sink.failures = 1
            with pytest.raises(ControlError, match="503.*not taken"):
                await world.control.finalize(W, rewards=1.0)
            with pytest.raises(openai.ConflictError):
                await client.chat.completions.create(**BODY)
            return await world.control.finalize(W, rewards=1.0), world.sink.rows

    final, rows = asyncio.run(run())
    assert final["accepted"] == {"planner_model": 1} and len(rows) == 1


def test_a_failed_workflow_hands_over_its_rows_without_rewards(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            await world.client((await world.open(W))["planner"]).chat.completions.create(**BODY)
            await world.control.finalize(W, status="failed", error="ValueError: no plan in the answer")
            return world.sink.records

    [record] = asyncio.run(run())
    assert (record.status, record.error) == ("failed", "ValueError: no plan in the answer")
    assert [row.reward for row in record.trajectories] == [None]


def test_abort_ends_running_generations_and_leaves_one_record_without_rows(folder, texts):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            first = await agent.post()
            running = asyncio.create_task(agent.post())
            await until(lambda: engine.running)
            answer = await world.control.abort(W, error="deadline")
            await until(lambda: engine.aborted)
            return first.status_code, answer, (await running).status_code, world.sink.records

    first, answer, cut, [record] = asyncio.run(run())
    assert (first, cut) == (200, 409)
    assert answer["calls"] == {"abandoned(failed_workflow)": 2}
    assert (record.status, record.trajectories, record.error) == ("aborted", (), "deadline")


@pytest.mark.parametrize("turns_of_the_loop", range(4))
def test_a_call_given_up_just_when_its_models_gate_opens_is_not_sampled(folder, texts, turns_of_the_loop):
    async def run():
        engine = slow(texts)
        async with one_model(folder, engine, open_models=False) as world:
            async with RawAgent((await world.open(W))["planner"]) as agent:
                await world.set_state("planner_model", ModelState.SYNCING)
                held = asyncio.create_task(agent.post())
                gate, session = world.gateway.gates["planner_model"], world.gateway.sessions.find(W)
                await until(lambda: gate.waiting)
                gate.set_state(ModelState.OPEN)
                for _ in range(turns_of_the_loop):
                    await asyncio.sleep(0)
                await session.abandon_all("failed_workflow")
                return (await held).status_code, session.status()["calls"], engine.rows

    status, calls, sampled = asyncio.run(run())
    assert (status, calls) == (409, {"abandoned(failed_workflow)": 1})
    assert not any(ids for _, ids, _ in sampled)


def test_an_evaluation_workflow_returns_its_trajectories_and_never_enters_the_ledger(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            await world.client((await world.open(W, purpose="eval"))["planner"]).chat.completions.create(**BODY)
            return await world.control.finalize(W, rewards=None, score=1.0), world.sink.records

    final, records = asyncio.run(run())
    assert len(final["trajectories"]) == 1 and final["accepted"] == {} and records == []


def test_closed_workflows_are_forgotten_beyond_their_bound_and_open_ones_are_refused(folder, texts):  # invariant 10
    async def run():
        bounds = {"max_open_workflows": 2, "max_closed_workflows": 2}
        async with one_model(folder, FakeEngine(texts.says("plan")), **bounds) as world:
            await world.open("a")
            await world.open("b")
            with pytest.raises(ControlError, match="429"):
                await world.open("c")
            for workflow_id in ("a", "b"):
                await world.control.finalize(workflow_id)
            first = await world.open("c")
            await world.control.finalize("c")
            with pytest.raises(ControlError, match="404"):
                await world.control.status("a")
            assert (await world.control.status("c"))["status"] == "no_calls"
            store = world.gateway.sessions
            return first, len(store._closed), len(store._by_token)

    _, closed, tokens = asyncio.run(run())
    assert (closed, tokens) == (2, 2)


def test_calls_of_one_workflow_are_bounded(folder, texts):  # invariant 10
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan")), max_calls_per_workflow=2) as world:
            client = world.client((await world.open(W))["planner"])
            for _ in range(2):
                await client.chat.completions.create(**BODY)
            with pytest.raises(openai.BadRequestError, match="may not make more"):
                await client.chat.completions.create(**BODY)
            return (await world.control.finalize(W, rewards=1.0))["accepted"]

    assert asyncio.run(run()) == {"planner_model": 2}


def test_stopping_the_gateway_ends_generations_at_the_servers(folder, texts):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.5)
        async with one_model(folder, engine) as world, RawAgent((await world.open(W))["planner"]) as agent:
            running = asyncio.create_task(agent.post())
            await until(lambda: engine.running)
            started = time.monotonic()
            await world.router.stop()
            stopped_s = time.monotonic() - started
            answer = await running
            return stopped_s, answer.status_code, engine.aborted

    stopped_s, status, aborted = asyncio.run(run())
    assert stopped_s < 3 and status == 409 and aborted == [f"{W}:planner:0#0"]


def test_a_paused_workflow_holds_its_requests_and_no_other_workflows(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("plan"))
        async with one_model(folder, engine) as world:
            client, other = [world.client((await world.open(w))["planner"]) for w in (W, "e0-t0-s1-a0")]
            await world.control.pause(W)
            held = asyncio.create_task(client.chat.completions.create(**BODY))
            await other.chat.completions.create(**BODY)
            await asyncio.sleep(0.02)
            seen = len(engine.requests), held.done(), (await world.control.status(W))["state"]
            await world.control.resume(W)
            return seen, (await held).choices[0].message.content

    assert asyncio.run(run()) == ((1, False, "paused"), "plan")


def test_a_pause_past_the_hold_time_is_a_429_and_finalize_lets_held_requests_go_with_409(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan")), hold_timeout_s=0.1) as world:
            client = world.client((await world.open(W))["planner"])
            await world.control.pause(W)
            with pytest.raises(openai.RateLimitError, match="paused"):
                await client.chat.completions.create(**BODY)
            held = asyncio.create_task(client.chat.completions.create(**BODY))
            await asyncio.sleep(0.03)
            await world.control.finalize(W)
            with pytest.raises(openai.ConflictError):
                await held
            with pytest.raises(ControlError, match="409"):
                await world.control.resume(W)

    asyncio.run(run())


def test_rewards_reported_on_the_way_are_used_where_finalize_brings_none(folder, texts):
    async def run():
        async with one_model(folder, FakeEngine(texts.says("plan"))) as world:
            answer = await world.client((await world.open(W))["planner"]).chat.completions.create(**BODY)
            await world.control.report_rewards(W, {"planner": 0.1})
            await world.control.report_rewards(W, {answer.metadata["request_id"]: 0.75})
            await world.control.finalize(W)
            return [row.reward for row in world.sink.rows]

    assert asyncio.run(run()) == [0.75]


@pytest.mark.parametrize("ends", ["finalized", "aborted"])
def test_a_closed_workflow_is_freed_without_the_garbage_collector(folder, texts, ends):
    """The collector stops every request while it looks; with references in circles it would have to look often."""

    def alive():
        return sorted(type(o).__name__ for o in gc.get_objects() if isinstance(o, (Call, Exchange, WorkflowSession)))

    async def run():
        gc.collect()
        gc.freeze()  # what is there already is not looked at
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            async with one_model(folder, FakeEngine(texts.echoes())) as world:
                async with RawAgent((await world.open(W))["planner"]) as agent:
                    first = (await agent.post()).json()["choices"][0]["message"]
                    messages = [*BODY["messages"], first, {"role": "user", "content": "and then?"}]
                    await agent.post({**BODY, "messages": messages})
                    await agent.post({**BODY, "n": 2})
                before = alive()
                if ends == "finalized":
                    await world.control.finalize(W, rewards=1.0)
                else:
                    await world.control.abort(W)
                await asyncio.sleep(0.05)
                after = alive()
                gc.collect()
                return before, after, [type(o).__name__ for o in gc.garbage if type(o).__module__.startswith("recipe.")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            gc.unfreeze()

    before, after, garbage = asyncio.run(run())
    assert before == ["Call"] * 4 + ["Exchange"] * 3 + ["WorkflowSession"]
    assert after == []
    assert garbage == [], "nor do its requests leave any"
