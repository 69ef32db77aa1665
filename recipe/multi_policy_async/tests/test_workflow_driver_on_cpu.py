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
"""WorkflowDriver: every started workflow ends once (invariant 4), admission alone waits (10), no silent death (8)."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from recipe.multi_policy_async.ingest.batch_source import End, IngestBatchSource, TakenBatch
from recipe.multi_policy_async.tests.fakes.driven_job import (
    Job,
    Scripted,
    eventually,
    play,
)
from recipe.multi_policy_async.tests.fakes.gateway_control import URL, connection_error, http_error
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    workflow_stats,
)
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.workflows.base import Outcome, Task


def test_every_member_of_every_task_ends_once_and_the_trainers_are_told_the_end(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=3, epochs=2)

    async def scenario():
        await job.driver.run()
        source = IngestBatchSource(job.ingestor, PLANNER, groups=6, poll_s=0.1)
        batch = await source.next_batch(Version(0, 0))
        source.mark_consumed(Version(0, 1))
        return batch, await source.next_batch(Version(0, 1)), await job.endings(), await job.driver.stats()

    batch, end, endings, stats = play(job, scenario)
    assert len(batch.groups) == 6 and isinstance(end, End)
    assert endings == {"ok": 12}
    assert sorted(job.gateway.finalized) == sorted(
        (f"e{epoch}-t{task}-s{sample}-a0", "ok") for epoch in range(2) for task in range(3) for sample in range(2)
    )
    assert (stats["finished"], stats["failed"], stats["running"], stats["score_mean"]) == (12, 0, 0, 1.0)


def test_the_order_of_tasks_is_fixed_by_the_seed_and_differs_between_epochs(tmp_path):
    def order(folder):
        job = Job(folder, Scripted(), tasks=20, epochs=2, max_concurrent=1, n=1)
        play(job)
        return [workflow_id for workflow_id, _ in job.gateway.finalized]

    first, second = order(tmp_path / "a"), order(tmp_path / "b")
    assert first == second
    tasks = [workflow_id.split("-")[1] for workflow_id in first]
    assert sorted(tasks[:20]) == sorted(tasks[20:]) and tasks[:20] != tasks[20:]


def test_an_error_of_the_workflow_is_a_failed_member_and_is_not_tried_again(tmp_path):
    job = Job(tmp_path, Scripted({0: [RuntimeError("no plan"), 1.0]}), tasks=1)

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.ingestor.stats())[PLANNER]["dropped"], await job.driver.stats()

    endings, dropped, stats = play(job, scenario)
    assert endings == {"failed": 1, "ok": 1}
    assert dropped == {"failed_workflow": 1, "group_too_small": 1}
    assert stats["last_error"] == "RuntimeError: no plan" and stats["retried"] == 0


def test_a_workflow_that_passes_its_deadline_is_a_failed_member(tmp_path):
    job = Job(tmp_path, Scripted({0: [lambda: asyncio.sleep(60), 1.0]}), tasks=1, timeout_s=0.05)

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["last_error"]

    endings, error = play(job, scenario)
    assert endings == {"failed": 1, "ok": 1} and "deadline" in error


class RaisesOnFloat:
    def __repr__(self):
        return "RaisesOnFloat()"  # a test id, the same in every process

    def __float__(self):
        raise RuntimeError("device is gone")


@pytest.mark.parametrize(
    "result",
    [None, "good", {}, float("nan"), -1e39, np.zeros((2, 2)), Outcome(1.0, score=[1]), RaisesOnFloat()],
    ids=repr,
)
def test_a_result_that_is_no_reward_is_a_failed_member_and_its_error_names_the_workflow(tmp_path, result):
    job = Job(tmp_path, Scripted({0: [result]}), tasks=1, n=1)

    async def scenario():
        await job.driver.run()
        return await job.endings(), await job.driver.stats()

    endings, stats = play(job, scenario)
    assert endings == {"failed": 1} and stats["retried"] == 0
    assert "result of workflow e0-t0-s0-a0: " in stats["last_error"]


def test_a_reward_that_the_gateway_refuses_is_a_failed_member(tmp_path):
    job = Job(tmp_path, Scripted({0: [{"stranger": 1.0}]}), tasks=1, n=1)
    job.gateway.errors["finalize"] = [http_error(400)]

    async def scenario():
        await job.driver.run()
        return await job.endings()

    assert play(job, scenario) == {"failed": 1}


def test_an_episode_that_cannot_be_written_down_ends_well(tmp_path):
    job = Job(tmp_path, Scripted({0: [Outcome(1.0, info=None)]}), tasks=1, n=1, dump_every=1)
    (tmp_path / "episodes.jsonl").mkdir()

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["episodes_not_written"]

    assert play(job, scenario) == ({"ok": 1}, 1)


def test_an_agent_that_used_up_its_calls_is_a_failed_member_and_is_not_played_again(tmp_path):
    request = httpx.Request("POST", f"{URL}/v1/chat/completions")
    refusal = httpx.Response(400, json={"error": {"code": "too_many_calls"}}, request=request)
    error = httpx.HTTPStatusError("more than it may", request=request, response=refusal)
    job = Job(tmp_path, Scripted({0: [error]}), tasks=1, n=1)

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["retried"]

    assert play(job, scenario) == ({"failed": 1}, 0)


class Blocking:
    """A plain function: ``seconds`` of a task's episode, then 1.0."""

    def __init__(self, seconds: dict[int, float] | None = None):
        self.seconds = seconds or {}
        self.together = threading.Barrier(8)

    def run(self, task: Task, agents: Any) -> float:
        if task.index in self.seconds:
            time.sleep(self.seconds[task.index])
        else:
            self.together.wait(5)
        return 1.0


def test_synchronous_workflows_run_as_many_at_once_as_configured(tmp_path):
    """More than the threads of asyncio's own pool on a small machine."""
    job = Job(tmp_path, Blocking(), tasks=8, n=1, max_concurrent=8)

    async def scenario():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        await job.driver.run()
        return await job.endings()

    assert play(job, scenario) == {"ok": 8}


def test_the_deadline_of_a_synchronous_workflow_begins_when_it_has_a_thread(tmp_path):
    job = Job(tmp_path, Blocking({0: 1.0, 1: 0.35}), tasks=2, n=1, max_concurrent=1, timeout_s=0.6)
    job.driver._plan["shuffle"] = False

    async def scenario():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await job.driver.run()
        return await job.endings()

    # The first one holds the only thread for 0.4 s after its deadline, and 0.4 + 0.35 is more than 0.6.
    assert play(job, scenario) == {"failed": 1, "ok": 1}


def test_a_synchronous_workflow_that_finds_no_thread_is_a_failed_member_that_says_so(tmp_path):
    job = Job(tmp_path, Blocking({0: 0.5, 1: 0.0}), tasks=2, n=1, max_concurrent=1, timeout_s=0.1)
    job.driver._plan["shuffle"] = False

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["last_error"]

    endings, error = play(job, scenario)
    assert endings == {"failed": 2} and "found no free thread within 0.1 s" in error


def test_a_policy_that_was_not_there_leads_to_a_new_attempt(tmp_path):
    job = Job(tmp_path, Scripted({0: [connection_error(), 1.0]}), tasks=1)

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["retried"]

    endings, retried = play(job, scenario)
    assert endings == {"ok": 2} and retried == 1
    assert sorted(workflow_id[-2:] for workflow_id, _ in job.gateway.finalized) == ["a0", "a1"]
    assert len(job.gateway.aborted) == 1, "the session of the first attempt is released"


def test_a_workflow_that_passes_its_deadline_at_the_gate_of_a_policy_that_is_down_is_tried_again(tmp_path):
    """It is not the agents' fault: 64 such failures would end a job whose policy only starts again."""
    job = Job(tmp_path, Scripted({0: [lambda: asyncio.sleep(60), 1.0]}), tasks=1, n=1, timeout_s=0.05)
    job.gateway.waiting = {"e0-t0-s0-a0": PLANNER}

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.driver.stats())["retried"]

    assert play(job, scenario) == ({"ok": 1}, 1)


def test_a_deadline_is_the_workflows_own_where_the_gateway_does_not_say_that_it_is_blocked(tmp_path):
    job = Job(tmp_path, Scripted({0: [lambda: asyncio.sleep(60), 1.0]}), tasks=1, n=1, timeout_s=0.05)

    async def away(longer_than_s):
        raise ConnectionError("gateway is away")

    job.gateway.blocked = away

    async def scenario():
        await job.driver.run()
        return await job.endings()

    assert play(job, scenario) == {"failed": 1}


def test_an_error_of_another_service_is_the_workflows_own(tmp_path):
    job = Job(tmp_path, Scripted({0: [connection_error("http://tool.example")]}), tasks=1, n=1)

    async def scenario():
        await job.driver.run()
        return await job.endings()

    assert play(job, scenario) == {"failed": 1}


def test_a_lost_answer_to_finalize_does_not_make_a_second_record(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=1, n=1)
    job.gateway.lose_answers = ["finalize"]

    async def scenario():
        await job.driver.run()
        return await job.endings(), (await job.ingestor.stats())[PLANNER]["accepted"]

    assert play(job, scenario) == ({"ok": 1}, 1)


def test_attempts_are_bounded_and_the_group_closes_without_the_aborted_member(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=1, n=1, max_attempts=2)
    job.gateway.errors["create_workflow"] = [http_error(503)] * 100

    async def scenario():
        await job.driver.run()
        return await job.endings(), workflow_stats(job.ingestor)

    endings, stats = play(job, scenario)
    assert endings == {"aborted": 1} and stats["open_tasks"] == 0


def test_no_more_workflows_run_at_once_than_allowed(tmp_path):
    workflow = Scripted()
    play(Job(tmp_path, workflow, tasks=10, n=4, max_concurrent=3))
    assert workflow.most_running == 3


class NeedsSolver:
    """Every second task needs the solver, which is paused until ``opened`` is set."""

    def __init__(self):
        self.job: Job | None = None
        self.opened = asyncio.Event()
        self.running = self.most_running = 0

    async def run(self, task: Task, agents: Any) -> float:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        workflow_id = agents["solver"].base_url.split("/")[4]
        if task.index % 2 and not self.opened.is_set():
            self.job.gateway.waiting[workflow_id] = SOLVER
            await self.opened.wait()
            self.job.gateway.waiting.pop(workflow_id, None)
        self.running -= 1
        return 1.0


@pytest.mark.parametrize("quota", [10, 4])
def test_a_paused_policy_does_not_stop_workflows_that_do_not_need_it_up_to_its_quota(tmp_path, quota):
    """Ten of twenty workflows need the paused policy, two slots are there for all (invariants 7 and 10)."""
    workflow = NeedsSolver()
    job = workflow.job = Job(tmp_path, workflow, tasks=20, n=1, max_concurrent=2, max_blocked_per_policy=quota)

    async def scenario():
        running = asyncio.create_task(job.driver.run())
        if quota >= 10:
            await eventually(lambda: len(job.gateway.finalized) == 10)
        else:
            await eventually(lambda: len(job.gateway.waiting) == quota + 2)
        stats = await job.driver.stats()
        workflow.opened.set()
        await running
        return stats["blocked"], await job.endings()

    blocked, endings = play(job, scenario)
    assert endings == {"ok": 20} and blocked <= quota and workflow.most_running <= 2 + quota


def test_production_stops_at_the_lead_until_a_version_is_trained(tmp_path):
    job = Job(tmp_path, Scripted(), tasks=10, lead=4)

    async def scenario():
        running = asyncio.create_task(job.driver.run())
        sources = [IngestBatchSource(job.ingestor, m, groups=4, poll_s=0.05) for m in (PLANNER, SOLVER)]
        await eventually(job.waits_for_training)
        started = [(await job.driver.stats())["tasks_started"]]
        for source in sources:
            assert isinstance(await source.next_batch(Version(0, 0)), TakenBatch)
        await eventually(job.waits_for_training)
        started.append((await job.driver.stats())["tasks_started"])
        for source in sources:
            source.mark_consumed(Version(0, 1))
            assert isinstance(await source.next_batch(Version(0, 1)), TakenBatch)
        await eventually(job.waits_for_training)
        started.append((await job.driver.stats())["tasks_started"])
        await job.driver.stop()
        await running
        return started

    assert play(job, scenario) == [4, 4, 8]


def test_drain_lets_the_running_workflows_end_and_starts_no_more(tmp_path):
    go = asyncio.Event()

    async def wait():
        await go.wait()
        return 1.0

    workflow = Scripted({task: [wait] for task in range(10)})
    job = Job(tmp_path, workflow, tasks=10, max_concurrent=4)

    async def scenario():
        running = asyncio.create_task(job.driver.run())
        await eventually(lambda: workflow.running == 4)
        await job.driver.drain()
        await asyncio.sleep(0.02)
        assert not running.done()
        go.set()
        await running
        return await job.endings()

    assert play(job, scenario) == {"ok": 4}


def test_stop_writes_an_aborted_record_for_every_workflow_that_runs(tmp_path):
    workflow = Scripted({task: [lambda: asyncio.sleep(60)] for task in range(10)})
    job = Job(tmp_path, workflow, tasks=10, max_concurrent=4)

    async def scenario():
        running = asyncio.create_task(job.driver.run())
        await eventually(lambda: workflow.running == 4)
        await job.driver.stop()
        await running
        return await job.endings()

    assert play(job, scenario) == {"aborted": 4}


def test_a_restarted_driver_takes_up_what_was_in_flight_and_repeats_nothing_that_ended(tmp_path):
    hang = {task: [1.0, lambda: asyncio.sleep(60)] for task in range(4)}
    workflow = Scripted(hang)
    first = Job(tmp_path, workflow, tasks=4, max_concurrent=4)

    async def crash():
        running = asyncio.create_task(first.driver.run())
        await eventually(lambda: len(first.gateway.finalized) == 4 and workflow.running == 4)
        first.reach_ingestor.dead = True  # a killed process writes nothing more
        running.cancel()
        await asyncio.wait({running})

    play(first, crash)
    ended = first.gateway.finalized
    assert len(ended) == 4

    second = Job(tmp_path, Scripted(), tasks=4)
    play(second)
    members = [workflow_id.rsplit("-", 1)[0] for workflow_id, _ in (*ended, *second.gateway.finalized)]
    assert sorted(members) == sorted(f"e0-t{task}-s{sample}" for task in range(4) for sample in range(2))
    assert {workflow_id[-2:] for workflow_id, _ in second.gateway.finalized} == {"a1"}


def test_some_episodes_are_written_down(tmp_path):
    play(Job(tmp_path, Scripted(), tasks=4, n=1, dump_every=2))
    lines = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0]["question"].startswith("question") and lines[0]["score"] == 1.0
