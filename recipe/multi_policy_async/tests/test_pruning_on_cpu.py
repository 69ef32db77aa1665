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
"""The ledger is pruned by itself whatever made rows needless, and only then; so its file has a bound."""

import sqlite3

import numpy as np
import pytest

from ..trajectory import Version
from .fakes.driven_job import eventually
from .fakes.workflow_records import PLANNER, SOLVER, finish_task, queue_spec, stats_of, with_ingestor

SOON = 0.002  # prune_every_s
LONG = {"response_ids": np.arange(2000, dtype=np.int32)} | {
    name: np.ones(2000, dtype=dtype)
    for name, dtype in (("response_mask", np.uint8), ("log_probs", np.float32), ("versions", np.int32))
}


def _rows(folder) -> int:
    disk = sqlite3.connect(folder / "ledger.sqlite")
    ((rows,),) = disk.execute("SELECT count(*) FROM payloads")
    disk.close()
    return rows


async def _train(ingestor, step: int) -> None:
    batch = await ingestor.take(PLANNER, 4, Version(0, step - 1), 5)
    await ingestor.mark_consumed(PLANNER, batch.batch_id, step, 0)


async def _nothing(ingestor, step: int) -> None:
    """The policy is frozen, has retired, or does not get round to training."""


async def _save(ingestor, step: int) -> None:
    await _train(ingestor, step)
    await ingestor.add_checkpoint(PLANNER, 0, step, "digest", "path")
    if step > 1:
        await ingestor.remove_checkpoint(PLANNER, 0, step - 1)


@pytest.mark.parametrize(
    ("trained", "retired", "queue", "act"),
    [
        (True, False, {}, _train),
        (True, False, {}, _save),
        (True, False, {"max_queue_groups": 2}, _nothing),  # surplus
        (True, True, {}, _nothing),
        (False, False, {}, _nothing),  # recorded
        (True, False, {"min_group_size": 3}, _nothing),  # too small
    ],
    ids=["trained", "saved", "too full", "retired", "frozen", "too small"],
)
def test_the_file_stops_growing_while_workflows_go_on(tmp_path, trained, retired, queue, act):
    """Whatever becomes of their rows; the first steps show how large it is before anything is pruned."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(**queue), trained)
        if retired:
            await ingestor.retire(PLANNER)
        sizes = []
        for step in range(1, 26):
            for task in range(4):
                await finish_task(ingestor, 4 * step + task, **LONG)
            await act(ingestor, step)
            await eventually(lambda: _rows(tmp_path) <= 8)
            sizes.append((tmp_path / "ledger.sqlite").stat().st_size)
        stats = await stats_of(ingestor)
        assert stats["accepted"] == 200
        return sizes

    sizes = with_ingestor(tmp_path, scenario, prune_every_s=SOON)
    assert max(sizes) <= 2 * max(sizes[:5]), sizes


def test_what_only_a_removed_checkpoint_needed_is_pruned_though_nothing_is_trained_any_more(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for step in (1, 2):
            await ingestor.add_checkpoint(PLANNER, 0, step, "digest", "path")
        for task in range(4):
            await finish_task(ingestor, task, version=1)
        batch = await ingestor.take(PLANNER, 4, Version(0, 1), 5)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 2, 0)
        await _looked(ingestor)
        before = _rows(tmp_path)
        await ingestor.remove_checkpoint(PLANNER, 0, 1)
        await eventually(lambda: _rows(tmp_path) == 0)
        return before

    assert with_ingestor(tmp_path, scenario, prune_every_s=SOON) == 8


def test_what_only_replay_needed_is_pruned_when_its_policy_retires(tmp_path):
    replay = {"max_uses": 2, "max_age": 4, "max_share": 0.5}

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(replay=replay), True)
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
        await finish_task(ingestor, 0)
        batch = await ingestor.take(PLANNER, 1, Version(0, 0), 5)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        await _looked(ingestor)
        before = _rows(tmp_path)
        await ingestor.retire(PLANNER)
        await eventually(lambda: _rows(tmp_path) == 0)
        return before

    assert with_ingestor(tmp_path, scenario, prune_every_s=SOON) == 2


def test_a_ledger_in_which_nothing_changes_is_not_pruned_again(tmp_path):
    async def scenario(ingestor):
        ledger, pruned = ingestor._state.ledger, []
        prune = ledger.prune
        ledger.prune = lambda replayable: (pruned.append(True), prune(replayable))[1]
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await ingestor.register_policy(SOLVER, queue_spec(), False)
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        await _looked(ingestor)
        before = len(pruned)
        for _ in range(5):
            await _looked(ingestor)
        return before, len(pruned)

    before, after = with_ingestor(tmp_path, scenario, prune_every_s=SOON)
    assert 0 < before == after


async def _looked(ingestor) -> None:
    """Until the ledger was looked at and found as it was."""
    ledger, looks = ingestor._state.ledger, []
    changes = ledger.changes
    ledger.changes = lambda: looks.append(changes()) or looks[-1]
    try:
        await eventually(lambda: len(looks) > 1 and looks[-1] == looks[-2] == changes())
    finally:
        ledger.changes = changes
