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
"""The ingestor as a Ray actor: its batches, its refusals and its death as a trainer's process sees them."""

import asyncio

import pytest
import ray

from ...ingest.batch_source import IngestBatchSource, ProducerDied
from ...ingest.handle import TargetDiedError, call
from ...trajectory import Version
from ...trajectory_ingestor import TrajectoryIngestor
from ..fakes.workflow_records import PLANNER, ingest_spec, queue_spec, record, trajectory

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # 127.0.0.2: Ray replaces 127.0.0.1 by the address of a network interface.
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
    yield
    ray.shutdown()


@pytest.fixture
def ingestor(tmp_path):
    actor = ray.remote(num_cpus=0, max_concurrency=100)(TrajectoryIngestor)
    handle = actor.remote(str(tmp_path / "ledger.sqlite"), ingest_spec())
    yield handle
    ray.kill(handle)


async def _finish(ingestor, task: int) -> None:
    for sample in range(2):
        await call(ingestor, "issue", f"e0-t{task}-s{sample}-a0", 2)
    for sample in range(2):
        name = f"e0-t{task}-s{sample}-a0"
        await call(ingestor, "ingest", record(name, trajectory(name)))


def test_batches_and_reports_cross_the_process_boundary(ingestor):
    async def scenario():
        await call(ingestor, "register_policy", PLANNER, queue_spec(), True)
        source = IngestBatchSource(ingestor, PLANNER, groups=1, poll_s=0.2)
        taking = asyncio.create_task(source.next_batch(Version(0, 0)))
        await asyncio.sleep(0.5)  # several polls
        await _finish(ingestor, 0)
        batch = await asyncio.wait_for(taking, 10)
        source.mark_consumed(Version(0, 1))
        await source.flush()
        return batch, (await call(ingestor, "stats"))[PLANNER]

    batch, stats = asyncio.run(scenario())
    assert batch.groups[0].trajectories[1].log_probs.tolist() == [-0.25, 0.0, -1.5]
    assert (stats["trained"], stats["unaccounted"]) == (2, 0)


def test_a_refusal_is_a_value_error_on_the_callers_side(ingestor):
    with pytest.raises(ValueError, match="never issued"):
        asyncio.run(call(ingestor, "ingest", record("e0-t0-s0-a0")))


def test_a_trainer_that_waits_learns_that_the_ingest_process_was_killed(ingestor):
    async def scenario():
        await call(ingestor, "register_policy", PLANNER, queue_spec(), True)
        source = IngestBatchSource(ingestor, PLANNER, groups=1, poll_s=30.0)
        waiting = asyncio.create_task(source.next_batch(Version(0, 0)))
        await asyncio.sleep(0.2)
        ray.kill(ingestor)
        answer = await asyncio.wait_for(waiting, 20)
        with pytest.raises(TargetDiedError, match="stats"):
            await call(ingestor, "stats")
        return answer

    answer = asyncio.run(scenario())
    assert isinstance(answer, ProducerDied) and "ActorDiedError" in answer.cause
