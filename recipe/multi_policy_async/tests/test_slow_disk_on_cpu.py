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
"""A slow disk is back-pressure: who finalizes waits, nothing new starts, memory does not fill (invariant 10)."""

import asyncio
import weakref

from ..trajectory import WorkflowRecord
from .fakes.driven_job import Job, eventually, play
from .fakes.slow_disk import slow_disk
from .fakes.workflow_records import PLANNER, SOLVER, record, register_both, stats_of, trajectory, with_ingestor

TASKS, MEMBERS, SLOTS = 8, 2, 4


class Together:
    """Workflows that run until they are told to end, all at once."""

    def __init__(self):
        self.running = 0
        self.end = asyncio.Event()

    async def run(self, task, agents):
        self.running += 1
        await self.end.wait()
        self.running -= 1
        return 1.0


class Records:
    """Passes records on; knows how many callers wait for a commit, and how many records are in memory."""

    def __init__(self, ingest):
        self._ingest = ingest
        self._seen: list[weakref.ref[WorkflowRecord]] = []
        self.waiting = self.committed = 0

    async def __call__(self, sent):
        self._seen.append(weakref.ref(sent))
        self.waiting += 1
        answer = await self._ingest(sent)
        self.waiting -= 1
        self.committed += 1
        return answer

    @property
    def held(self) -> int:
        return sum(each() is not None for each in self._seen)


async def everything_else() -> None:
    """What does not need the disk has happened after so many turns of the loop."""
    for _ in range(200):
        await asyncio.sleep(0)


def drive(tmp_path, act):
    """A job with all slots in play, then ``act(job, disk, records)``, then its end with nothing lost."""
    workflow = Together()
    job = Job(tmp_path, workflow, tasks=TASKS, n=MEMBERS, max_concurrent=SLOTS)
    records = job.gateway._sink = Records(job.reach_ingestor.ingest)

    async def scenario():
        with slow_disk(job.ingestor) as disk:
            driving = asyncio.create_task(job.driver.run())
            await eventually(lambda: workflow.running == SLOTS)
            result = await act(job, workflow, disk, records, driving)
            await driving
        assert await job.endings() == {"ok": TASKS * MEMBERS}, "invariant 4"
        for model_id in (PLANNER, SOLVER):
            assert (await stats_of(job.ingestor, model_id))["queued"] == TASKS * MEMBERS, "nothing is lost"
        assert records.committed == TASKS * MEMBERS
        await eventually(lambda: records.held == 0)  # the ledger's thread lets go of the last one a moment later
        return result

    return play(job, scenario, asyncio.run)  # a slow disk stops a thread of its own


def test_while_the_disk_is_slow_finalizing_workflows_wait_and_no_new_ones_start(tmp_path):
    async def act(job, workflow, disk, records, driving):
        disk.slow()
        workflow.end.set()
        await eventually(lambda: records.waiting == SLOTS and disk.waiting)
        stood_still = []
        most = 0
        while not driving.done():
            await eventually(lambda: disk.waiting or driving.done())
            await everything_else()
            most = max(most, records.held)
            stood_still.append((records.committed, len(job.gateway.created)))
            if not driving.done():
                await disk.let_one_go()
        return stood_still, most

    stood_still, most = drive(tmp_path, act)
    assert stood_still[0] == (0, SLOTS), "all slots wait for the first commit, and nobody has begun in their place"
    assert all(started <= committed + SLOTS for committed, started in stood_still)
    assert most == SLOTS, "one record for each slot, however long it lasts"


def test_with_a_fast_disk_the_same_workflows_wait_for_nothing(tmp_path):
    """The control: what stood still above goes through when nobody lets anything go."""

    async def act(job, workflow, disk, records, driving):
        workflow.end.set()
        await driving
        return records.waiting, len(job.gateway.created)

    assert drive(tmp_path, act) == (0, TASKS * MEMBERS)


def test_callers_of_the_ingestor_are_acknowledged_one_by_one_as_the_disk_takes_their_records(tmp_path):
    """However many there are: a record is with its caller until it is on disk, and never acknowledged before."""

    async def scenario(ingestor):
        await register_both(ingestor)
        names = [f"e0-t{task}-s0-a0" for task in range(20)]
        for name in names:
            await ingestor.issue(name, 1)
        records = Records(ingestor.ingest)
        with slow_disk(ingestor) as disk:
            disk.slow()
            sending = [
                asyncio.create_task(records(record(name, trajectory(name), trajectory(name, row=1)))) for name in names
            ]
            seen = []
            for _ in names:
                await eventually(lambda: disk.waiting)
                await everything_else()
                seen.append((records.waiting, (await stats_of(ingestor))["accepted"]))
                await disk.let_one_go()
            await asyncio.gather(*sending)
        del sending
        await eventually(lambda: records.held == 0)
        return seen, (await stats_of(ingestor))["accepted"]

    seen, accepted = with_ingestor(tmp_path, scenario)
    assert seen == [(20 - done, 2 * done) for done in range(20)]
    assert accepted == 40
