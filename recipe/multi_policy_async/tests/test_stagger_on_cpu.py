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
"""Weight syncs of several policies move apart, and nobody waits beyond the bound (ingest/stagger.py)."""

import heapq
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..ingest.stagger import SyncStagger
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, SOLVER, finish_task, queue_spec, with_ingestor


@dataclass
class Job:
    """Policies that train for a period, ask, sync for a while, and begin again, on a clock of its own."""

    max_wait_s: float
    policies: dict[str, tuple[float, float]]  # period and duration of a sync
    silent: frozenset[str] = frozenset()  # their syncs never end
    syncs: list[tuple[float, float, str]] = field(default_factory=list)  # begin, end, policy
    waits: dict[str, list[float]] = field(default_factory=dict)

    def run(self, until: float) -> "Job":
        stagger = SyncStagger(self.max_wait_s)
        for name in self.policies:
            stagger.ended(name)  # its first version
        asked: dict[str, float] = {}
        self.waits = {name: [] for name in self.policies}
        events = [(period, name, "is ready") for name, (period, _) in self.policies.items()]
        heapq.heapify(events)
        while events and events[0][0] < until:
            now, name, what = heapq.heappop(events)
            if what == "has synced":
                stagger.ended(name)
                heapq.heappush(events, (now + self.policies[name][0], name, "is ready"))
                for other in asked:  # what ``changes.notify`` does
                    heapq.heappush(events, (now, other, "asks again"))
                continue
            if what == "is ready":
                asked[name] = now
            if name not in asked:
                continue  # it was let through meanwhile
            if (wait_s := stagger.wait_s(name, now)) > 0:
                heapq.heappush(events, (now + wait_s, name, "asks again"))
                continue
            self.waits[name].append(now - asked.pop(name))
            end = now + self.policies[name][1]
            self.syncs.append((now, end, name))
            if name not in self.silent:
                heapq.heappush(events, (end, name, "has synced"))
        assert sum(stagger.waited_s.values()) == pytest.approx(sum(sum(waits) for waits in self.waits.values()))
        return self

    def overlaps(self) -> int:
        return sum(
            a[2] != b[2] and a[0] < b[1] and b[0] < a[1] for i, a in enumerate(self.syncs) for b in self.syncs[:i]
        )

    def counts(self) -> Counter[str]:
        return Counter(name for _, _, name in self.syncs)


PERIODS = st.floats(1, 50)
DURATIONS = st.floats(0.01, 20)
POLICIES = st.dictionaries(st.sampled_from("abcd"), st.tuples(PERIODS, DURATIONS), min_size=1)


@settings(max_examples=100, deadline=None)
@given(policies=POLICIES, max_wait_s=st.floats(0, 30), silent=st.sets(st.sampled_from("abcd"), max_size=1))
def test_nobody_waits_beyond_the_bound_and_nobody_starves(policies, max_wait_s, silent):
    """Whatever the periods; also when one policy's sync never ends."""
    until = 500.0
    job = Job(max_wait_s, policies, frozenset(silent)).run(until)
    for name, (period, duration) in policies.items():
        assert all(wait <= max_wait_s + 1e-6 for wait in job.waits[name])
        if name not in silent:
            assert job.counts()[name] >= int(until / (period + max_wait_s + duration)) - 1


@settings(max_examples=50, deadline=None)
@given(period=PERIODS, durations=st.lists(st.floats(0.01, 0.3), min_size=2, max_size=4))
def test_policies_of_one_period_move_apart_once_and_wait_no_more(period, durations):
    """The wait moves a policy's phase: this is why no lock is needed."""
    policies = {name: (period + sum(durations) - each, each) for name, each in zip("abcd", durations, strict=False)}
    job = Job(max_wait_s=sum(durations), policies=policies).run(until=10 * (period + 2))
    assert job.overlaps() == 0
    for waits in job.waits.values():
        assert max(waits[1:], default=0) < 1e-6


def test_without_it_policies_of_one_period_sync_at_once():
    job = Job(max_wait_s=0, policies={"a": (10, 1), "b": (10, 1)}).run(until=100)
    assert job.overlaps() == job.counts()["a"] == 9 and not any(sum(waits) for waits in job.waits.values())


def test_several_that_wait_for_one_do_not_begin_together():
    job = Job(max_wait_s=10, policies={name: (20, 2) for name in "abcd"}).run(until=60)
    assert [begin for begin, _, _ in job.syncs[:4]] == [20, 22, 24, 26]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scenario(tmp_path, steps, max_wait_s=10.0):
    """Two policies whose trainers have taken a first batch, on an ingestor whose clock stands."""
    clock = Clock()

    async def run(ingestor):
        ingestor._state.clock = clock
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
        first = [await ingestor.may_publish(model_id, Version(0, 0), 0) for model_id in (PLANNER, SOLVER)]
        assert first == [True, True], "first weights are sent side by side"
        for model_id in (PLANNER, SOLVER):
            await ingestor.synced(model_id)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        for model_id in (PLANNER, SOLVER):
            batch = await ingestor.take(model_id, 1, Version(0, 0), 0)
            await ingestor.mark_consumed(model_id, batch.batch_id, 1, 0)
        return await steps(ingestor, clock)

    return with_ingestor(tmp_path, run, stagger={"max_wait_s": max_wait_s})


async def may_sync(ingestor, model_id) -> bool:
    return await ingestor.may_publish(model_id, Version(0, 1), 0)


def test_a_policy_holds_its_version_until_the_other_serves_its_own(tmp_path):
    async def steps(ingestor, clock):
        answers = [await may_sync(ingestor, PLANNER), await may_sync(ingestor, SOLVER)]
        clock.now = 3.0
        await ingestor.synced(PLANNER)
        answers.append(await may_sync(ingestor, SOLVER))
        stats = await ingestor.stats()
        return answers, [stats[model_id]["staggered_s"] for model_id in (PLANNER, SOLVER)]

    assert scenario(tmp_path, steps) == ([True, False, True], [0.0, 3.0])


def test_it_holds_for_max_wait_s_at_most(tmp_path):
    async def steps(ingestor, clock):
        answers = []
        for model_id, now in ((PLANNER, 0.0), (SOLVER, 1.0), (SOLVER, 9.9), (SOLVER, 10.0)):
            clock.now = now
            answers.append(await may_sync(ingestor, model_id))
        return answers

    assert scenario(tmp_path, steps) == [True, False, False, True], "a sync that long holds nobody any more"


@pytest.mark.parametrize("how", ["retire", "register", "end"])
def test_a_policy_that_is_gone_holds_nobody(tmp_path, how):
    async def steps(ingestor, clock):
        assert await may_sync(ingestor, PLANNER) and not await may_sync(ingestor, SOLVER)
        if how == "retire":
            await ingestor.retire(PLANNER)
        elif how == "register":
            await ingestor.register_policy(PLANNER, queue_spec(), True)
        else:
            await ingestor.end_of_data()
        return await may_sync(ingestor, SOLVER)

    assert scenario(tmp_path, steps)


def test_off_nobody_waits(tmp_path):
    async def steps(ingestor, clock):
        return await may_sync(ingestor, PLANNER), await may_sync(ingestor, SOLVER)

    assert scenario(tmp_path, steps, max_wait_s=0.0) == (True, True)
