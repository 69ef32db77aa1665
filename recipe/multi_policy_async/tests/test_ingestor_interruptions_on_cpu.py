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
"""Trainers that start again, cancelled calls, disks that are slow or full: nothing is lost (invariants 2 and 3)."""

import asyncio
import sqlite3
import time

import pytest

from recipe.multi_policy_async.ingest.database import Database
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    finish_task,
    queue_spec,
    record,
    register_both,
    stats_of,
    trajectory,
    with_ingestor,
    workflow_stats,
)
from recipe.multi_policy_async.trajectory import Version

V0 = Version(0, 0)


def test_a_restarted_trainer_finds_the_batch_that_its_predecessor_took(tmp_path):
    async def scenario(ingestor):
        incarnations = [await ingestor.register_policy(PLANNER, queue_spec(), True)]
        await finish_task(ingestor, 0)
        taken = await ingestor.take(PLANNER, 1, V0, 1)
        orphan = asyncio.create_task(ingestor.take(PLANNER, 1, V0, 10))  # the dead trainer's last call
        await asyncio.sleep(0)
        incarnations.append(await ingestor.register_policy(PLANNER, queue_spec(), True))
        again = await ingestor.take(PLANNER, 1, Version(1, 0), 1)
        with pytest.raises(ValueError, match="is not taken"):
            await ingestor.mark_consumed(PLANNER, taken.batch_id, 1, 0)
        await ingestor.mark_consumed(PLANNER, again.batch_id, 1, 1)
        return incarnations, await orphan, (await stats_of(ingestor))["trained"]

    assert with_ingestor(tmp_path, scenario) == ([0, 1], None, 2)


def test_a_take_that_is_cancelled_leaves_its_groups_in_the_queue(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await finish_task(ingestor, 0)
        for ticks in range(12):
            if ticks:
                await finish_task(ingestor, ticks)
            taking = asyncio.create_task(ingestor.take(PLANNER, 1, V0, 10))
            for _ in range(ticks):
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait({taking})
            batch = await ingestor.take(PLANNER, 1, V0, 1) if taking.cancelled() else taking.result()
            assert batch.groups[0].group_id == f"e0-t{ticks}/planner"
            await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        return await stats_of(ingestor)

    assert with_ingestor(tmp_path, scenario)["trained"] == 24


def test_an_ingest_that_is_cancelled_is_committed_whole_or_not_at_all(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        for task in range(10):
            name = f"e0-t{task}-s0-a0"
            await ingestor.issue(name, 1)
            sending = asyncio.create_task(ingestor.ingest(record(name, trajectory(name), trajectory(name, row=1))))
            for _ in range(task):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait({sending})
            await ingestor.ingest(record(name, trajectory(name), trajectory(name, row=1)))
        return await stats_of(ingestor), workflow_stats(ingestor)

    stats, workflows = with_ingestor(tmp_path, scenario)
    assert stats["accepted"] == 20 and workflows == {"open_tasks": 0, "in_flight": 0, "endings": {"ok": 10}}


def test_the_ingestor_answers_while_the_disk_is_slow(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        commit = ingestor._state.ledger.commit_terminal
        ingestor._state.ledger.commit_terminal = lambda plan: (time.sleep(0.3), commit(plan))
        sending = asyncio.create_task(ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0"))))
        await asyncio.sleep(0.01)
        started = time.monotonic()
        await ingestor.stats()
        return time.monotonic() - started, sending.done(), await sending

    seconds, done, answer = with_ingestor(tmp_path, scenario)
    assert seconds < 0.2 and not done and answer == {PLANNER: 1}


def test_an_ingest_that_the_disk_refuses_changes_nothing_and_can_be_repeated(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        commit = ingestor._state.ledger.commit_terminal

        def full(plan):
            raise sqlite3.OperationalError("database or disk is full")

        ingestor._state.ledger.commit_terminal = full
        sent = record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0"), trajectory("e0-t0-s0-a0", row=1))
        with pytest.raises(sqlite3.OperationalError):
            await ingestor.ingest(sent)
        before = (await stats_of(ingestor))["accepted"]
        ingestor._state.ledger.commit_terminal = commit
        return before, await ingestor.ingest(sent), (await stats_of(ingestor))["queue_groups"]

    assert with_ingestor(tmp_path, scenario) == (0, {PLANNER: 2}, 1)


def test_an_error_that_sqlite_has_rolled_back_itself_is_told_as_it_is(tmp_path):
    """As it does in the middle of a transaction on a full disk; here by a conflict clause."""
    database = Database(tmp_path / "ledger.sqlite", synchronous="normal")
    add = "INSERT OR ROLLBACK INTO meta VALUES ('a', 'b')"
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"), database.transaction():
        database.execute(add)
        database.execute(add)
    with database.transaction():
        database.execute(add)
    database.close()


@pytest.mark.parametrize(
    ("rule", "reason"), [({"on_small_group": "drop"}, "group_too_small"), ({"filter_equal_rewards": True}, "filtered")]
)
def test_groups_that_wait_go_by_the_rules_of_the_job_that_takes_them(tmp_path, rule, reason):
    """What a former job queued with a moving average is not handed to an estimator alone, which takes its reward."""
    former = queue_spec(on_small_group="ema", min_group_size=2)
    members = 1 if reason == "group_too_small" else 2

    async def before(ingestor):
        await ingestor.register_policy(PLANNER, former, True)
        await finish_task(ingestor, 0, members=members)
        assert (await stats_of(ingestor))["queue_groups"] == 1

    async def after(ingestor):
        await ingestor.register_policy(PLANNER, former.model_copy(update=rule), True)
        assert await ingestor.take(PLANNER, 1, Version(1, 0), 0.0) is None
        return await stats_of(ingestor)

    with_ingestor(tmp_path, before)
    stats = with_ingestor(tmp_path, after)
    assert (stats["dropped"][reason], stats["queue_groups"], stats["unaccounted"]) == (members, 0, 0)
