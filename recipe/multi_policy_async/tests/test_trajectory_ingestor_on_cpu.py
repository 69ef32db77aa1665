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
"""TrajectoryIngestor: acks, groups, takes, staleness and admission (invariants 2, 3, 4, 6, 10 of design.md)."""

import asyncio

import numpy as np
import pytest

from recipe.multi_policy_async.ingest.batch_source import End, ProducerDied, TakenBatch
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    queue_spec,
    record,
    trajectory,
    with_ingestor,
)
from recipe.multi_policy_async.trajectory import Version

V0 = Version(0, 0)


async def _model(ingestor, model_id=PLANNER):
    stats = (await ingestor.stats())["models"][model_id]
    assert stats["unaccounted"] == 0, "invariant 3"
    return stats


def test_a_finished_task_becomes_one_group_with_its_rows_exactly_as_sampled(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0, members=2)
        return await ingestor.take(PLANNER, 1, V0, 1)

    batch = with_ingestor(tmp_path, scenario)
    assert isinstance(batch, TakenBatch)
    (group,) = batch.groups
    assert (group.group_id, group.agent_id, len(group.trajectories)) == ("e0-t0/planner", "planner", 2)
    sent = trajectory("e0-t0-s1-a0")
    got = group.trajectories[1]
    for name in ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
        assert getattr(got, name).dtype == getattr(sent, name).dtype
    assert (got.reward, got.turn, got.request_id) == (sent.reward, sent.turn, sent.request_id)


def test_a_group_stays_open_until_all_members_have_ended(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for sample in range(3):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 3)
        for sample in range(2):
            await ingestor.ingest(record(f"e0-t0-s{sample}-a0", trajectory(f"e0-t0-s{sample}-a0")))
        assert await ingestor.take(PLANNER, 1, V0, 0.05) is None
        await ingestor.ingest(record("e0-t0-s2-a0", status="no_calls"))
        return await ingestor.take(PLANNER, 1, V0, 1)

    batch = with_ingestor(tmp_path, scenario)
    assert len(batch.groups[0].trajectories) == 2


def test_a_waiting_take_is_woken_by_the_group_that_completes_it(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        taking = asyncio.create_task(ingestor.take(PLANNER, 2, V0, 10))
        await finish_task(ingestor, 0)
        await asyncio.sleep(0.01)
        assert not taking.done()
        await finish_task(ingestor, 1)
        return await asyncio.wait_for(taking, 1)

    assert len(with_ingestor(tmp_path, scenario).groups) == 2
