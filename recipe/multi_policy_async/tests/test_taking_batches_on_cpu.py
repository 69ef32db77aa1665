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
"""Taking batches of an ingestor: staleness, trainers that die with one, ends, coalescing (invariants 2, 3, 6, 10)."""

import asyncio

import numpy as np
import pytest

from ..ingest.batch_source import End, ProducerDied
from ..trajectory import Version
from ..trajectory_ingestor import TrajectoryIngestor
from .fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    ingest_spec,
    queue_spec,
    record,
    register_both,
    stats_of,
    trajectory,
    with_ingestor,
)

V0 = Version(0, 0)


def test_an_over_full_queue_loses_its_oldest_whole_groups_and_nothing_of_the_other_policy(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_queue_groups=2), True)
        await ingestor.register_policy(SOLVER, queue_spec(), True)
        for task in range(4):
            await finish_task(ingestor, task, models=(PLANNER, SOLVER))
        batch = await ingestor.take(PLANNER, 2, V0, 1)
        return batch, await stats_of(ingestor), await stats_of(ingestor, SOLVER)

    batch, planner, solver = with_ingestor(tmp_path, scenario)
    assert [group.group_id for group in batch.groups] == ["e0-t2/planner", "e0-t3/planner"]
    assert planner["dropped"] == {"surplus": 4} and solver["dropped"] == {} and solver["queue_groups"] == 4


@pytest.mark.parametrize(("bound", "taken"), [(None, [0, 1, 2]), (2, [1, 2]), (1, [2]), (0, [])])
def test_groups_above_the_staleness_bound_are_dropped_where_they_are_taken(tmp_path, bound, taken):
    """Invariant 6: version before the step minus the oldest version of any token."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=bound, min_batch_groups=1, coalesce_s=0), True)
        for version in range(3):
            await finish_task(ingestor, version, version=version)
        batch = await ingestor.take(PLANNER, 3, Version(0, 3), 0.05)
        return batch, await stats_of(ingestor)

    batch, stats = with_ingestor(tmp_path, scenario)
    assert [g.group_id for g in (batch.groups if batch else ())] == [f"e0-t{task}/planner" for task in taken]
    stale = 2 * (3 - len(taken))
    assert stats["dropped"] == ({"stale": stale} if stale else {})


def test_staleness_counts_the_oldest_token_of_the_oldest_row(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True)
        for sample in range(2):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 2)
        mixed = np.array([3, -1, 5], dtype=np.int32)
        await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", version=5)))
        await ingestor.ingest(record("e0-t0-s1-a0", trajectory("e0-t0-s1-a0", versions=mixed)))
        return await ingestor.take(PLANNER, 1, Version(0, 5), 0.05), (await stats_of(ingestor))["dropped"]

    assert with_ingestor(tmp_path, scenario) == (None, {"stale": 2})


def test_consumed_rows_are_never_taken_again(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        for task in range(3):
            await finish_task(ingestor, task)
        first = await ingestor.take(PLANNER, 1, V0, 1)
        second = await ingestor.take(PLANNER, 2, V0, 1)
        for batch in (second, first):
            await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        with pytest.raises(ValueError, match="is not taken"):
            await ingestor.mark_consumed(PLANNER, second.batch_id, 1, 0)
        return [group.group_id for group in second.groups], await stats_of(ingestor)

    groups, stats = with_ingestor(tmp_path, scenario)
    assert groups == ["e0-t1/planner", "e0-t2/planner"] and stats["trained"] == 6 and stats["queued"] == 0


def test_a_batch_that_its_trainer_died_with_comes_first_for_the_next_one(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        for task in range(2):
            await finish_task(ingestor, task)
        await ingestor.take(PLANNER, 1, V0, 1)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True)
        again = await ingestor.take(PLANNER, 1, Version(incarnation, 0), 1)
        return again.groups[0].group_id, (await stats_of(ingestor))["queued"]

    assert with_ingestor(tmp_path, scenario) == ("e0-t0/planner", 2)


def test_a_group_that_trainer_after_trainer_dies_with_is_poison(tmp_path):
    """The next group is taken then; a trainer that dies without a batch accuses none."""

    async def scenario(ingestor):
        await register_both(ingestor)
        for task in range(2):
            await finish_task(ingestor, task)
        seen, incarnation = [], 0
        for dies_with_a_batch in (True, False, True, False, True):
            if dies_with_a_batch:
                batch = await ingestor.take(PLANNER, 1, Version(incarnation, 0), 1)
                seen.append(batch.groups[0].group_id)
            incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True)
        stats = await stats_of(ingestor)
        return seen, stats["dropped"], stats["queued"], stats["unaccounted"]

    seen, dropped, queued, unaccounted = with_ingestor(tmp_path, scenario, max_give_backs=1)
    assert seen == ["e0-t0/planner", "e0-t0/planner", "e0-t1/planner"]
    assert (dropped, queued, unaccounted) == ({"poison": 2}, 2, 0)


def test_a_batch_can_be_dropped_only_under_a_reason_of_the_closed_list(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await finish_task(ingestor, 0)
        batch = await ingestor.take(PLANNER, 1, V0, 1)
        with pytest.raises(ValueError, match="'because' is not one of stale, surplus"):
            await ingestor.drop(PLANNER, batch.batch_id, "because")
        await ingestor.drop(PLANNER, batch.batch_id, "non_finite")
        return (await stats_of(ingestor))["dropped"]

    assert with_ingestor(tmp_path, scenario) == {"non_finite": 2}


def test_a_retired_policy_gets_the_end_and_its_later_rows_are_counted(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        await ingestor.issue("e0-t1-s0-a0", 2)
        await ingestor.issue("e0-t1-s1-a0", 2)
        await ingestor.ingest(record("e0-t1-s0-a0", trajectory("e0-t1-s0-a0")))
        taking = asyncio.create_task(ingestor.take(PLANNER, 5, V0, 10))
        await asyncio.sleep(0)
        await ingestor.retire(PLANNER)
        await ingestor.ingest(record("e0-t1-s1-a0", trajectory("e0-t1-s1-a0")))
        return await taking, await stats_of(ingestor), await stats_of(ingestor, SOLVER)

    answer, planner, solver = with_ingestor(tmp_path, scenario)
    assert isinstance(answer, End) and "retired" in answer.reason
    assert planner["dropped"] == {"retired": 4} and planner["queued"] == planner["open"] == 0
    assert solver["queue_groups"] == 1, "invariant 7"


def test_at_the_end_of_data_a_trainer_gets_the_rest_and_then_the_end(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        taking = asyncio.create_task(ingestor.take(PLANNER, 5, V0, 10))
        await finish_task(ingestor, 0)
        await ingestor.end_of_data()
        return await taking, await ingestor.take(PLANNER, 5, V0, 10)

    rest, end = with_ingestor(tmp_path, scenario)
    assert len(rest.groups) == 1 and isinstance(end, End)


def test_a_dead_producer_is_told_at_once_with_its_cause(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        taking = asyncio.create_task(ingestor.take(PLANNER, 5, V0, 10))
        await asyncio.sleep(0)
        await ingestor.producer_died("the driver ran out of memory")
        return await taking

    assert with_ingestor(tmp_path, scenario) == ProducerDied("the driver ran out of memory")


def test_a_small_batch_is_given_out_after_the_coalescing_time(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(min_batch_groups=2, coalesce_s=0.1), True)
        await finish_task(ingestor, 0)
        assert await ingestor.take(PLANNER, 4, V0, 0.15) is None
        await finish_task(ingestor, 1)
        return await ingestor.take(PLANNER, 4, V0, 5)

    assert len(with_ingestor(tmp_path, scenario).groups) == 2


def test_the_coalescing_time_is_that_of_the_group_that_has_waited_longest(tmp_path):
    """Groups with older tokens that close later, those of long workflows, do not begin it anew."""
    clock = [0.0]

    async def scenario():
        ingestor = TrajectoryIngestor(tmp_path / "ledger.sqlite", ingest_spec(), clock=lambda: clock[0])
        await ingestor.register_policy(PLANNER, queue_spec(min_batch_groups=1, coalesce_s=10.0), True)
        for clock[0], task, version in ((0.0, 0, 2), (9.0, 1, 1), (10.0, 2, 0)):
            await finish_task(ingestor, task, version=version)
        batch = await ingestor.take(PLANNER, 8, Version(0, 2), 0)
        await ingestor.close()
        return batch

    batch = asyncio.run(scenario())
    assert batch is not None and len(batch.groups) == 3


def test_a_large_batch_takes_what_waits_up_to_the_maximum(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_batch_groups=3), True)
        for task in range(5):
            await finish_task(ingestor, task)
        return await ingestor.take(PLANNER, 2, V0, 1)

    assert len(with_ingestor(tmp_path, scenario).groups) == 3
