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
"""Slots: a paused policy keeps none from workflows that do not need it, and what runs stays bounded (invariant 10)."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ..workflows.slots import Slots, watch_blocked
from .fakes.gateway_control import http_error
from .fakes.workflow_records import PLANNER, SOLVER

POLICIES = (PLANNER, SOLVER)


class Crowd:
    """Workflows that run until they are told to end."""

    def __init__(self, common: int, per_policy: int):
        self.slots = Slots(common, per_policy)
        self.tasks: dict[str, asyncio.Task] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.running: list[str] = []

    def start(self) -> None:
        name = f"w{len(self.tasks)}"
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))

    async def _run(self, name: str) -> None:
        async with self.slots.hold(name):
            self.running.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(name)

    async def settle(self) -> None:
        for _ in range(4 * len(self.tasks) + 4):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        for event in self.ends.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def play(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_workflows_blocked_on_one_policy_give_their_slots_to_others_up_to_that_policys_quota():
    async def scenario():
        crowd, ran = Crowd(common=2, per_policy=3), []
        for _ in range(9):
            crowd.start()
        for _ in range(4):
            await crowd.settle()
            ran.append(len(crowd.running))
            crowd.slots.update(dict.fromkeys(crowd.running, PLANNER))
        await crowd.settle()
        ran.append(len(crowd.running))
        await crowd.end_all()
        return ran

    assert play(scenario()) == [2, 4, 5, 5, 5]


def test_the_quota_of_one_policy_does_not_serve_workflows_blocked_on_another():
    async def scenario():
        crowd = Crowd(common=2, per_policy=1)
        for _ in range(9):
            crowd.start()
        for policy in (PLANNER, PLANNER, SOLVER, SOLVER):
            await crowd.settle()
            blocked = dict.fromkeys(crowd.running, policy) | crowd.slots._blocked
            crowd.slots.update(blocked)
        held = Counter(crowd.slots._blocked.values())
        await crowd.end_all()
        return held

    assert play(scenario()) == {PLANNER: 1, SOLVER: 1}


def test_workflows_whose_policy_opened_go_on_at_once_and_the_next_ones_wait_until_the_pool_has_room():
    async def scenario():
        crowd = Crowd(common=2, per_policy=2)
        for _ in range(5):
            crowd.start()
        await crowd.settle()
        first = list(crowd.running)
        crowd.slots.update(dict.fromkeys(first, PLANNER))
        await crowd.settle()
        crowd.slots.update({})
        ran = [len(crowd.running)]
        for name in first:
            crowd.ends[name].set()
            await crowd.settle()
            ran.append(len(crowd.running))
        crowd.ends["w2"].set()
        await crowd.settle()
        ran.append(len(crowd.running))
        await crowd.end_all()
        return ran

    assert play(scenario()) == [4, 3, 2, 2]


actions = st.one_of(
    st.just("start"),
    st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 30)),
    st.dictionaries(st.integers(0, 30), st.sampled_from(POLICIES), max_size=12),
)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(actions, max_size=40))
@settings(max_examples=60, deadline=None)
def test_whatever_is_blocked_ends_or_is_cancelled_running_stays_bounded_and_no_slot_is_lost(common, per_policy, script):
    async def scenario():
        crowd = Crowd(common, per_policy)
        for action in script:
            if action == "start":
                crowd.start()
            elif isinstance(action, dict):
                names = list(crowd.tasks)
                crowd.slots.update({names[i]: policy for i, policy in action.items() if i < len(names)})
            elif action[1] < len(crowd.tasks):
                name = list(crowd.tasks)[action[1]]
                crowd.ends[name].set() if action[0] == "end" else crowd.tasks[name].cancel()
            await crowd.settle()
            assert len(crowd.running) <= common + per_policy * len(POLICIES)
            assert max(Counter(crowd.slots._blocked.values()).values(), default=0) <= per_policy
            assert set(crowd.slots._blocked) <= set(crowd.running) and crowd.slots.running == len(crowd.running)
            waiting = sum(not task.done() for task in crowd.tasks.values()) - len(crowd.running)
            assert not waiting or len(crowd.running) - crowd.slots.blocked >= common, "a free slot is given"
        await crowd.end_all()
        for _ in range(common + 3):
            crowd.start()
        await crowd.settle()
        whole = len(crowd.running)
        await crowd.end_all()
        return whole

    assert play(scenario()) == common


def test_the_gateway_is_asked_only_while_slots_are_short_and_may_be_away():
    answers = [http_error(503), {"e0-t1-s0-a2": PLANNER, "eval-7-t0-r0": SOLVER}]

    async def scenario():
        slots, asked, changed = Slots(1, 1), [], asyncio.Event()

        async def ask(longer_than_s):
            asked.append(longer_than_s)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        watching = asyncio.create_task(watch_blocked(slots, ask, 0.001, changed.set))
        await asyncio.sleep(0.02)
        idle = list(asked)
        async with slots.hold("e0-t1-s0"):
            await changed.wait()
            blocked = slots.blocked
            watching.cancel()
        return idle, asked, blocked

    assert play(scenario()) == ([], [0.001, 0.001], 1)
