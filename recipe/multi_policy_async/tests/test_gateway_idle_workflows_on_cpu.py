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
"""Workflows that nobody finalizes are aborted after a bound, and only those (invariant 10)."""

import asyncio

import pytest

from ..gateway.call import CallState
from ..gateway.client import ControlError
from ..gateway.reaping import IdleReaper
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, World, gateway_world

IDLE_S = 600.0
OLD, NEW = "left-behind", "in-use"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def in_world(folder, act, **engine):
    """Run ``act(world, clock, reaper)``; the gateway's clock stands still unless the test moves it."""

    async def run():
        engines = {"planner_model": FakeEngine(Texts(folder).says("plan"), **engine)}
        async with gateway_world(folder, engines, mapping={"planner": "planner_model"}) as world:
            clock = Clock()
            world.gateway.sessions._clock = clock
            reaper = IdleReaper(world.gateway.sessions, world.gateway.closer, world.gateway.metrics, idle_s=IDLE_S)
            return await act(world, clock, reaper)

    return asyncio.run(run())


def test_a_workflow_left_behind_is_aborted_with_its_reason_and_one_in_use_is_not(folder):
    async def act(world: World, clock: Clock, reaper: IdleReaper):
        await world.client((await world.open(OLD))["planner"]).chat.completions.create(**ASK)
        await world.open(NEW)
        clock.now += IDLE_S - 1
        assert await reaper.reap() == []
        await world.control.status(NEW)
        clock.now += 2
        assert await reaper.reap() == [OLD]
        with pytest.raises(ControlError) as late:
            await world.control.report_rewards(OLD, 1.0)
        return world, late.value.status, await world.control.finalize(OLD, rewards=1.0)

    world, late, answer = in_world(folder, act)
    assert [(record.workflow_id, record.status) for record in world.sink.records] == [(OLD, "aborted")]
    assert "not used for 600 s" in world.sink.records[0].error and not world.sink.rows
    assert late == 409 and answer["status"] == "aborted" and answer["calls"] == {"abandoned(failed_workflow)": 1}
    assert world.metric("workflows_reaped_total") == 1


def test_a_workflow_that_is_used_again_while_others_are_aborted_is_not(folder):
    async def act(world: World, clock: Clock, reaper: IdleReaper):
        await world.open(OLD)
        await world.open(NEW)
        clock.now += IDLE_S + 1
        take = world.gateway.closer._sink

        async def slow_sink(record):
            await world.control.status(NEW)
            return await take(record)

        world.gateway.closer._sink = slow_sink
        return await reaper.reap()

    assert in_world(folder, act) == [OLD]


def test_an_agents_call_counts_as_use(folder):
    async def act(world: World, clock: Clock, reaper: IdleReaper):
        client = world.client((await world.open(OLD))["planner"])
        clock.now += IDLE_S
        await client.chat.completions.create(**ASK)
        clock.now += IDLE_S
        return await reaper.reap()

    assert in_world(folder, act) == []


def test_a_workflow_whose_call_runs_or_waits_is_never_idle(folder):
    async def act(world: World, clock: Clock, reaper: IdleReaper):
        client = world.client((await world.open(OLD))["planner"])
        call = asyncio.create_task(client.chat.completions.create(**ASK))
        while not world.engines["planner_model"].running:
            await asyncio.sleep(0.002)
        clock.now += 100 * IDLE_S
        running = await reaper.reap()
        await call
        session = world.gateway.sessions.open_sessions[0]
        while session.idle_s() == 0 and session._in_use:
            await asyncio.sleep(0.002)
        await world.control.pause(OLD)
        held = asyncio.create_task(client.chat.completions.create(**ASK))
        while not session._in_use:
            await asyncio.sleep(0.002)
        clock.now += 100 * IDLE_S
        waiting = await reaper.reap()
        await world.control.resume(OLD)
        await held
        return running, waiting, [call.state for call in session.calls]

    running, waiting, states = in_world(folder, act, token_s=0.01)
    assert running == waiting == [] and states == [CallState.KEPT] * 2


def test_one_whose_record_the_ingestor_refuses_is_forgotten_all_the_same(folder):
    """Somebody's workflow that the job never issued would else stay for ever."""

    async def act(world: World, clock: Clock, reaper: IdleReaper):
        await world.open(OLD)
        world.sink.failures = 1
        clock.now += IDLE_S + 1
        await reaper.reap()
        return world.gateway.sessions.open_sessions, world.sink.records

    assert in_world(folder, act) == ([], [])


@pytest.mark.parametrize(("idle_s", "reaped"), [(0.05, True), (None, False)])
def test_a_gateway_looks_for_them_by_itself_unless_told_not_to(folder, idle_s, reaped):
    async def run():
        engines = {"planner_model": FakeEngine(Texts(folder).says("plan"))}
        mapping = {"planner": "planner_model"}
        async with gateway_world(folder, engines, mapping=mapping, workflow_idle_s=idle_s) as world:
            await world.open(OLD)
            for _ in range(200 if reaped else 20):
                if not world.gateway.sessions.open_sessions:
                    return True
                await asyncio.sleep(0.01)
            return False

    assert asyncio.run(run()) is reaped
