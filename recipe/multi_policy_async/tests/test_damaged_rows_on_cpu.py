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
"""Rows that the ledger cannot give back are dropped once, as damaged; all the rest is trained (invariant 3)."""

import logging
import sqlite3

import numpy as np
import pytest

from ..ingest.batch_source import End
from ..trajectory import Version
from .fakes.workflow_records import (
    PLANNER,
    finish_task,
    queue_spec,
    record,
    stats_of,
    trajectory,
    with_ingestor,
)

V0 = Version(0, 0)
VICTIM = "e0-t1-s1-a0"


def write(folder, statement: str, *values) -> None:
    disk = sqlite3.connect(folder / "ledger.sqlite")
    with disk:
        assert disk.execute(statement, values).rowcount == 1
    disk.close()


OF_VICTIM = f"WHERE row_id = (SELECT id FROM rows WHERE workflow_id = '{VICTIM}')"
DAMAGES = {
    "cut": f"UPDATE payloads SET body = substr(body, 1, length(body) - 3) {OF_VICTIM}",
    "empty": f"UPDATE payloads SET body = x'' {OF_VICTIM}",
    "overwritten": f"UPDATE payloads SET body = CAST(x'0f' || substr(body, 2) AS BLOB) {OF_VICTIM}",
    "zeroed": f"UPDATE payloads SET body = zeroblob(length(body)) {OF_VICTIM}",
    "gone": f"DELETE FROM payloads {OF_VICTIM}",
}


def rows_of(batch) -> dict[str, list[str]]:
    return {group.group_id.split("/")[0]: [row.workflow_id for row in group.trajectories] for group in batch.groups}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_is_dropped_and_named_once_and_everything_else_is_trained(tmp_path, caplog, damage):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for task in range(3):
            await finish_task(ingestor, task, members=3)
        write(tmp_path, DAMAGES[damage])
        batch = await ingestor.take(PLANNER, 3, V0, 1)
        before = await stats_of(ingestor)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True)  # what was trained waits again
        again = await ingestor.take(PLANNER, 3, Version(incarnation, 0), 1)
        return rows_of(batch), before, rows_of(again), await stats_of(ingestor)

    with caplog.at_level(logging.ERROR):
        taken, before, again, after = with_ingestor(tmp_path, scenario)
    assert taken == again and sum(map(len, taken.values())) == 8
    assert taken["e0-t1"] == ["e0-t1-s0-a0", "e0-t1-s2-a0"], "its group goes on without it"
    assert before["dropped"] == after["dropped"] == {"damaged": 1}
    (message,) = [each.getMessage() for each in caplog.records]
    assert f"of workflow {VICTIM}, which is damaged in the ledger" in message


def test_what_is_left_of_a_group_is_judged_like_any_closed_group(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for task in range(2):
            await finish_task(ingestor, task)
        write(tmp_path, DAMAGES["cut"])
        waiting = await ingestor.take(PLANNER, 2, V0, 0)
        await finish_task(ingestor, 2)
        return waiting, rows_of(await ingestor.take(PLANNER, 2, V0, 1)), (await stats_of(ingestor))["dropped"]

    waiting, taken, dropped = with_ingestor(tmp_path, scenario)
    assert waiting is None, "one group is left, which is no batch of two"
    assert list(taken) == ["e0-t0", "e0-t2"] and dropped == {"damaged": 1, "group_too_small": 1}


def test_a_policy_all_of_whose_rows_are_damaged_waits_for_others_and_then_comes_to_its_end(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0)
        disk = sqlite3.connect(tmp_path / "ledger.sqlite")
        with disk:
            disk.execute("UPDATE payloads SET body = zeroblob(length(body))")
        disk.close()
        nothing = await ingestor.take(PLANNER, 1, V0, 0)
        await ingestor.end_of_data()
        return nothing, await ingestor.take(PLANNER, 1, V0, 1), (await stats_of(ingestor))["dropped"]

    nothing, end, dropped = with_ingestor(tmp_path, scenario)
    assert nothing is None and isinstance(end, End) and dropped == {"damaged": 2}


def test_pages_of_the_file_that_are_broken_cost_the_rows_on_them_alone(tmp_path):
    """SQLite itself finds the chain of a long payload's pages broken, and says so for the whole statement."""
    ids = np.arange(7_000_000, 7_010_000, dtype=np.int32)
    long = {
        "response_ids": ids,
        "response_mask": np.ones(len(ids), dtype=np.uint8),
        "log_probs": np.zeros(len(ids), dtype=np.float32),
        "versions": np.zeros(len(ids), dtype=np.int32),
    }

    async def fill(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0)
        for sample in range(3):
            await ingestor.issue(f"e0-t1-s{sample}-a0", 3)
        for sample in range(3):
            name = f"e0-t1-s{sample}-a0"
            await ingestor.ingest(record(name, trajectory(name, **(long if name == VICTIM else {}))))

    with_ingestor(tmp_path, fill)
    path = tmp_path / "ledger.sqlite"
    file = bytearray(path.read_bytes())
    middle = file.index(ids[5000:5010].tobytes())
    page = int.from_bytes(file[16:18], "big")
    start = middle - middle % page
    file[start : start + 4] = b"\xff\xff\xff\xff"  # number of the next page
    path.write_bytes(file)

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        batch = await ingestor.take(PLANNER, 2, Version(1, 0), 1)
        return rows_of(batch), (await stats_of(ingestor))["dropped"]

    taken, dropped = with_ingestor(tmp_path, scenario)
    assert [len(rows) for rows in taken.values()] == [2, 2] and dropped == {"damaged": 1}


@pytest.mark.parametrize(
    "statement", ["DELETE FROM images WHERE data = ?", "UPDATE images SET data = x'00' WHERE data = ?"]
)
def test_a_row_whose_image_is_damaged_is_dropped_too(tmp_path, statement):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for sample in range(3):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 3)
        for sample in range(3):
            name = f"e0-t0-s{sample}-a0"
            await ingestor.ingest(record(name, trajectory(name, images=(b"cat", b"dog") if sample else (b"dog",))))
        write(tmp_path, statement, b"cat")
        batch = await ingestor.take(PLANNER, 1, V0, 0)
        return batch, (await stats_of(ingestor))["dropped"]

    assert with_ingestor(tmp_path, scenario) == (None, {"damaged": 2, "group_too_small": 1})


def test_a_trained_group_that_is_damaged_is_not_replayed_and_stays_trained(tmp_path):
    async def scenario(ingestor):
        replay = {"max_uses": 3, "max_age": 4, "max_share": 0.9}
        await ingestor.register_policy(PLANNER, queue_spec(coalesce_s=0, min_batch_groups=1, replay=replay), True)
        for step, task in enumerate((0, 1)):
            await finish_task(ingestor, task, version=step)
            batch = await ingestor.take(PLANNER, 1, Version(0, step), 1)
            await ingestor.mark_consumed(PLANNER, batch.batch_id, step + 1, 0)
        write(tmp_path, DAMAGES["cut"])
        await finish_task(ingestor, 2, version=2)
        batch = await ingestor.take(PLANNER, 3, Version(0, 2), 1)
        return rows_of(batch), await stats_of(ingestor)

    taken, stats = with_ingestor(tmp_path, scenario)
    assert list(taken) == ["e0-t2", "e0-t0"] and stats["trained"] == 4 and stats["dropped"] == {}


def test_an_error_of_the_disk_that_passes_damages_nothing(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0)
        ledger = ingestor._state.ledger
        read = ledger.read

        def once(row_ids):
            ledger.read = read
            raise sqlite3.OperationalError("disk I/O error")

        ledger.read = once
        with pytest.raises(sqlite3.OperationalError):
            await ingestor.take(PLANNER, 1, V0, 1)
        return rows_of(await ingestor.take(PLANNER, 1, V0, 1)), (await stats_of(ingestor))["dropped"]

    taken, dropped = with_ingestor(tmp_path, scenario)
    assert list(taken) == ["e0-t0"] and dropped == {}
