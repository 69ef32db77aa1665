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
"""The queue as a trainer sees it, and as verl's queue client."""

import asyncio

import pytest

from recipe.multi_policy_async.ingest.batch_source import End, IngestBatchSource, ProducerDied, TakenBatch
from recipe.multi_policy_async.ingest.handle import TargetDiedError
from recipe.multi_policy_async.ingest.training_queue import ProducerDiedError, TrainingQueue
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    finish_task,
    queue_spec,
    record,
    trajectory,
    with_ingestor,
)
from recipe.multi_policy_async.trajectory import Version

V0, V1 = Version(0, 0), Version(0, 1)


def _with_queue(tmp_path, scenario, groups=1):
    async def run(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        return await scenario(ingestor, TrainingQueue(ingestor, PLANNER, groups=groups, poll_s=0.05))

    return with_ingestor(tmp_path, run)


def test_next_batch_waits_over_several_polls(tmp_path):
    async def scenario(ingestor, queue):
        taking = asyncio.create_task(queue.next_batch(V0))
        await asyncio.sleep(0.15)
        assert not taking.done()
        await finish_task(ingestor, 0)
        return await taking

    assert isinstance(_with_queue(tmp_path, scenario), TakenBatch)


def test_a_batch_must_be_settled_before_the_next_is_taken(tmp_path):
    async def scenario(ingestor, queue):
        await finish_task(ingestor, 0)
        await queue.next_batch(V0)
        with pytest.raises(ValueError, match="is still open"):
            await queue.next_batch(V0)

    _with_queue(tmp_path, scenario)


def test_reports_of_a_synchronous_hook_are_committed_by_flush(tmp_path):
    async def scenario(ingestor, queue):
        await finish_task(ingestor, 0)
        await queue.next_batch(V0)
        queue.mark_consumed(V1)
        await queue.flush()
        return (await ingestor.stats())[PLANNER]

    assert _with_queue(tmp_path, scenario)["trained"] == 2


def test_a_report_made_outside_the_event_loop_is_committed_by_flush(tmp_path):
    async def scenario(ingestor, queue):
        await finish_task(ingestor, 0)
        await queue.next_batch(V0)
        await asyncio.to_thread(queue.drop, "non_finite")
        await queue.flush()
        return (await ingestor.stats())[PLANNER]["dropped"]

    assert _with_queue(tmp_path, scenario) == {"non_finite": 2}


def test_a_report_that_failed_is_seen_at_the_next_batch(tmp_path):
    async def scenario(ingestor, queue):
        await finish_task(ingestor, 0)
        batch = await queue.next_batch(V0)
        await ingestor.drop(PLANNER, batch.batch_id, "non_finite")
        queue.mark_consumed(V1)
        with pytest.raises(ValueError, match="is not taken"):
            await queue.next_batch(V1)

    _with_queue(tmp_path, scenario)


def test_the_end_is_none_and_a_dead_producer_is_an_error_with_its_cause(tmp_path):
    async def scenario(ingestor, queue):
        await ingestor.end_of_data()
        end = await queue.get_sample(V0)
        await ingestor.producer_died("disk full")
        with pytest.raises(ProducerDiedError, match="planner_model: disk full"):
            await queue.get_sample(V0)
        return end

    assert _with_queue(tmp_path, scenario) is None


def test_an_ingest_process_that_died_is_a_dead_producer():
    class Dead:
        async def take(self, *args):
            raise TargetDiedError("ActorDiedError in take: killed")

    source = IngestBatchSource(Dead(), PLANNER, groups=1, poll_s=0.1)
    answer = asyncio.run(source.next_batch(V0))
    assert answer == ProducerDied("ActorDiedError in take: killed")


def test_verls_queue_methods_tell_what_is_in_the_queue(tmp_path):
    async def scenario(ingestor, queue):
        for task in range(3):
            await finish_task(ingestor, task)
        sizes = [await queue.get_queue_size()]
        sample, left = await queue.get_sample(V0)
        queue.mark_consumed(V1)
        await queue.flush()
        before = await queue.get_statistics()
        await queue.clear_queue()
        after = await queue.get_statistics()
        await queue.shutdown()
        return sizes, left, len(sample.groups), before, after, await queue.get_sample(V1)

    sizes, left, groups, before, after, end = _with_queue(tmp_path, scenario)
    assert (sizes, left, groups, end) == ([3], 2, 1, None)
    names = ("queue_size", "max_queue_size", "total_produced", "total_consumed", "dropped_samples")
    assert [before[name] for name in names] == [2, 8, 6, 2, 0]
    assert [after[name] for name in names] == [0, 8, 6, 2, 4] and after["dropped"] == {"shutdown": 4}


def test_put_sample_takes_a_terminal_record(tmp_path):
    async def scenario(ingestor, queue):
        await ingestor.issue("e0-t0-s0-a0", 1)
        await queue.put_sample(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0"), trajectory("e0-t0-s0-a0", row=1)))
        return await queue.next_batch(V0), await ingestor.retire(PLANNER)

    assert len(_with_queue(tmp_path, scenario)[0].groups) == 1


def test_a_retired_policy_ends_its_source(tmp_path):
    async def scenario(ingestor, queue):
        taking = asyncio.create_task(queue.next_batch(V0))
        await asyncio.sleep(0)
        await ingestor.retire(PLANNER)
        return await taking

    assert isinstance(_with_queue(tmp_path, scenario), End)
