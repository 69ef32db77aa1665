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
"""The ledger: transactions, restores, and what a reader of the file can rely on (invariants 2, 3 and 4)."""

import sqlite3

import pytest

from recipe.multi_policy_async.ingest import ledger_prune, reasons
from recipe.multi_policy_async.ingest.ledger import FateChange, Ledger, NewRow, TerminalCommit
from recipe.multi_policy_async.ingest.ledger_rows import DamagedRowsError
from recipe.multi_policy_async.ingest.row_codec import encode_arrays
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    queue_spec,
    record,
    trajectory,
    with_ingestor,
)
from recipe.multi_policy_async.trajectory import Version, WorkflowId


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", synchronous="normal")
    yield ledger
    ledger.close()


def _commit(ledger, workflow_id: str, first_row: int, fates=(None, None), closed=1):
    rows = [trajectory(workflow_id, row=i) for i in range(len(fates))]
    ledger.issue(WorkflowId.parse(workflow_id), 1, 0.0)
    ledger.commit_terminal(
        TerminalCommit(
            record=record(workflow_id, *rows),
            digest=b"digest",
            answer={PLANNER: len(rows)},
            rows=[
                NewRow(first_row + i, row, "group", fate, encode_arrays(row))
                for i, (row, fate) in enumerate(zip(rows, fates, strict=True))
            ],
            closed=closed,
        )
    )


def test_a_terminal_record_and_its_rows_are_committed_together_or_not_at_all(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1)
    with pytest.raises(sqlite3.IntegrityError):
        _commit(ledger, "e0-t1-s0-a0", 2, closed=2)  # row id 2 exists
    assert ledger.outcome("e0-t1-s0-a0") == (None, None, {})
    assert ledger.counts() == {PLANNER: {None: 2}}


def test_a_second_terminal_attempt_of_one_sample_is_impossible_in_the_file_itself(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1)
    with pytest.raises(sqlite3.IntegrityError):
        ledger._db.execute(
            "INSERT INTO workflows (workflow_id, task_key, sample, attempt, issued_at, status) "
            "VALUES ('e0-t0-s0-a1', 'e0-t0', 0, 1, 0, 'ok')"
        )


def test_a_row_gets_one_fate_only(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1)
    ledger.set_fates([FateChange([1], reasons.STALE)])
    with pytest.raises(AssertionError, match="invariant 3"):
        ledger.set_fates([FateChange([2], reasons.STALE), FateChange([1], reasons.SURPLUS)])
    with pytest.raises(AssertionError, match="invariant 2"):
        ledger.consume([2, 1], incarnation=0, step=1)
    assert ledger.counts() == {PLANNER: {None: 1, "stale": 1}}, "the failed transactions left nothing"


def test_a_fate_outside_the_closed_list_is_impossible_in_the_file_itself(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.set_fates([FateChange([1], "lost")])


@pytest.mark.parametrize("reason", reasons.ABANDON_REASONS)
def test_the_file_takes_every_reason_for_which_the_gateway_abandons_a_call(ledger, reason):
    for attempt, tokens in enumerate((3, 4)):
        workflow_id = WorkflowId(0, 0, 0, attempt)
        ledger.issue(workflow_id, 1, 0.0)
        ledger.abandon(str(workflow_id), b"digest", {(PLANNER, reason): tokens})
    counts = ledger._db.execute("SELECT reason, tokens FROM abandoned").fetchall()
    assert [tuple(each) for each in counts] == [(reason, 7)]


def test_many_rows_are_settled_and_read_in_the_order_asked_for(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1, fates=(None,) * 1203)
    ids = list(range(1203, 0, -1))
    assert [row.turn for row in ledger.read(ids)] == [row_id - 1 for row_id in ids]
    ledger.consume(ids, incarnation=0, step=7)
    assert ledger.counts() == {PLANNER: {"trained": 1203}}


def test_rows_that_cannot_be_read_are_told_with_their_workflows(ledger):
    _commit(ledger, "e0-t0-s0-a0", 1)
    ledger._db.execute("DELETE FROM payloads WHERE row_id = 2")
    with pytest.raises(DamagedRowsError, match="1 rows cannot be read, of workflows e0-t0-s0-a0: .* is gone") as damage:
        ledger.read([1, 2])
    assert [row.row_id for row in damage.value.rows] == [2]


def test_a_ledger_of_another_schema_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", synchronous="normal")
    ledger._db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    ledger.close()
    with pytest.raises(ValueError, match="schema version 99"):
        Ledger(tmp_path / "ledger.sqlite", synchronous="normal")


# -- restarts and restores ---------------------------------------------------------------------------------------------


async def _train(ingestor, step: int, tasks: list[int], incarnation: int = 0) -> None:
    """Finish tasks sampled by version ``step - 1`` and train them in the step that leads to ``step``."""
    for task in tasks:
        await finish_task(ingestor, task, version=step - 1, incarnation=incarnation)
    batch = await ingestor.take(PLANNER, len(tasks), Version(incarnation, step - 1), 5)
    await ingestor.mark_consumed(PLANNER, batch.batch_id, step, incarnation)


async def _take_all(ingestor, incarnation: int, number: int) -> list[str]:
    await ingestor.end_of_data()
    batch = await ingestor.take(PLANNER, 100, Version(incarnation, number), 0.05)
    return [group.group_id.split("/")[0] for group in getattr(batch, "groups", ())]


def test_a_restart_finds_open_queued_taken_and_in_flight_work_as_it_was(tmp_path):
    async def before(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0)
        await finish_task(ingestor, 1)
        await ingestor.take(PLANNER, 1, Version(0, 0), 1)  # taken, never settled
        for sample in range(2):
            await ingestor.issue(f"e0-t2-s{sample}-a0", 3)
        await ingestor.ingest(record("e0-t2-s0-a0", trajectory("e0-t2-s0-a0")))

    async def after(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        unfinished = await ingestor.unfinished()
        for workflow_id in unfinished["e0-t2"][0]:
            await ingestor.issue(workflow_id, 3)
            await ingestor.ingest(record(workflow_id, trajectory(workflow_id)))
        batch = await ingestor.take(PLANNER, 3, Version(1, 0), 1)
        return unfinished, batch, (await ingestor.stats())[PLANNER]

    with_ingestor(tmp_path, before)
    unfinished, batch, stats = with_ingestor(tmp_path, after)
    assert unfinished == {"e0-t2": (["e0-t2-s1-a1", "e0-t2-s2-a0"], 3)}
    assert [(group.group_id, len(group.trajectories)) for group in batch.groups] == [
        ("e0-t0/planner", 2),
        ("e0-t1/planner", 2),
        ("e0-t2/planner", 3),
    ]
    assert stats["unaccounted"] == 0 and stats["accepted"] == 7


def test_a_policy_restored_at_a_step_trains_again_what_only_lost_weights_have_seen(tmp_path):
    """Invariant 2 in the lineage of the surviving weights; rows sampled by lost weights are not trained."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await _train(ingestor, 1, [0])
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "checkpoints/1")
        await _train(ingestor, 2, [1])  # sampled by version 1, which survives
        await _train(ingestor, 3, [2])  # sampled by version 2, which is lost
        await finish_task(ingestor, 3, version=1)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))
        tasks = await _take_all(ingestor, incarnation, 1)
        return incarnation, tasks, (await ingestor.stats())[PLANNER]

    incarnation, tasks, stats = with_ingestor(tmp_path, scenario)
    assert incarnation == 1 and tasks == ["e0-t1", "e0-t3"]
    assert stats["trained"] == 2 and stats["dropped"] == {"rolled_back": 2} and stats["unaccounted"] == 0


def test_after_a_restore_rows_of_lost_weights_take_no_room_from_rows_that_survive(tmp_path):
    """What waits again may be more than the queue holds, until a task closes."""

    async def scenario(ingestor):
        spec = queue_spec(max_lead_groups=3)
        await ingestor.register_policy(PLANNER, spec, True)
        await _train(ingestor, 1, [0])
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "checkpoints/1")
        for step, tasks in ((2, [1, 2]), (3, [3, 4]), (4, [5, 6])):
            await _train(ingestor, step, tasks)
        incarnation = await ingestor.register_policy(PLANNER, spec, True, restored=(0, 1))
        lead = (await ingestor.stats())[PLANNER]["lead_groups"]
        await finish_task(ingestor, 7, version=1)
        return lead, await _take_all(ingestor, incarnation, 1), (await ingestor.stats())[PLANNER]

    lead, tasks, stats = with_ingestor(tmp_path, scenario)
    assert lead == 2 and tasks == ["e0-t1", "e0-t2", "e0-t7"]
    assert stats["dropped"] == {"rolled_back": 8} and stats["unaccounted"] == 0


def test_rows_of_a_lost_branch_stay_lost_after_a_second_restore(tmp_path):
    """Restored twice at version 1 of incarnation 0: version 2 of incarnation 1 is lost, version 1 of both is not."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await _train(ingestor, 1, [0])
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "checkpoints/1")
        await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))
        await _train(ingestor, 2, [1], incarnation=1)
        await finish_task(ingestor, 2, version=2, incarnation=1)
        await finish_task(ingestor, 3, version=1, incarnation=0)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))
        return incarnation, await _take_all(ingestor, incarnation, 1)

    # Task 1 was sampled by version 1 of incarnation 1: the restored weights under another name.
    assert with_ingestor(tmp_path, scenario) == (2, ["e0-t1", "e0-t3"])


def test_a_restore_gives_up_the_checkpoints_of_the_branch_it_leaves(tmp_path):
    """Else a row trained by both branches would be trained twice in the lineage of the older one (invariant 2)."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for step in (1, 2):
            await _train(ingestor, step, [step])
            await ingestor.add_checkpoint(PLANNER, 0, step, "digest", "path")
        await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))
        with pytest.raises(ValueError, match="given up by a restore at an earlier step"):
            await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 2))
        return await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))

    assert with_ingestor(tmp_path, scenario) == 2


def test_the_other_policy_keeps_what_it_trained_when_one_is_restored(tmp_path):
    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        for model_id in (PLANNER, SOLVER):
            batch = await ingestor.take(model_id, 1, Version(0, 0), 1)
            await ingestor.mark_consumed(model_id, batch.batch_id, 1, 0)
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        return await ingestor.stats()

    stats = with_ingestor(tmp_path, scenario)
    assert (stats[PLANNER]["trained"], stats[PLANNER]["queued"]) == (0, 2), "a fresh start has seen nothing"
    assert (stats[SOLVER]["trained"], stats[SOLVER]["queued"]) == (2, 0), "invariant 7"


def test_an_unknown_checkpoint_is_refused_and_starts_nothing(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        with pytest.raises(ValueError, match=r"no checkpoint of planner_model at \(0, 5\)"):
            await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 5))
        return await ingestor.register_policy(PLANNER, queue_spec(), True)

    assert with_ingestor(tmp_path, scenario) == 1


# -- pruning -----------------------------------------------------------------------------------------------------------


def _kept(tmp_path) -> set[str]:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as disk:
        tasks = {key for (key,) in disk.execute("SELECT DISTINCT task_key FROM rows")}
        with_payload = {
            key for (key,) in disk.execute("SELECT DISTINCT task_key FROM rows JOIN payloads ON row_id = id")
        }
    disk.close()
    assert tasks == with_payload
    return tasks


def test_a_trained_row_is_kept_while_a_checkpoint_lies_between_its_sampling_and_its_step(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        kept = []
        for step in range(1, 4):
            await _train(ingestor, step, [step])  # sampled by version step - 1
            await ingestor.add_checkpoint(PLANNER, 0, step, "digest", "path")
        await finish_task(ingestor, 4, version=1)
        batch = await ingestor.take(PLANNER, 1, Version(0, 3), 1)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 4, 0)  # checkpoints 1, 2 and 3 need it
        await ingestor.prune()
        for step in (1, 2, 3):
            kept.append(_kept(tmp_path))
            await ingestor.add_checkpoint(PLANNER, 0, step + 10, "digest", "path")
            await ingestor.remove_checkpoint(PLANNER, 0, step)
            await ingestor.prune()
        return [*kept, _kept(tmp_path)], (await ingestor.stats())[PLANNER]

    kept, stats = with_ingestor(tmp_path, scenario)
    # A row sampled by version v and trained towards v + 1 is needed by a checkpoint at v only; 0 was never one.
    assert kept == [{"e0-t2", "e0-t3", "e0-t4"}, {"e0-t3", "e0-t4"}, {"e0-t4"}, set()]
    assert stats["trained"] == 8 and stats["unaccounted"] == 0


def test_without_checkpoints_only_what_the_initial_weights_sampled_is_kept(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for step in (1, 2):
            await _train(ingestor, step, [step])
        await ingestor.prune()
        kept = _kept(tmp_path)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True)
        return kept, await _take_all(ingestor, incarnation, 0), (await ingestor.stats())[PLANNER]

    kept, tasks, stats = with_ingestor(tmp_path, scenario)
    assert kept == {"e0-t1"} and tasks == ["e0-t1"]
    assert stats["dropped"] == {"rolled_back": 2} and stats["trained"] == 0 and stats["unaccounted"] == 0


def test_the_rows_of_a_group_are_pruned_together(tmp_path):
    """A group that lost a row to pruning would be trained in part after a restore; here one of two rows is needed."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        for sample, version in enumerate((1, 3)):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 2)
            name = f"e0-t0-s{sample}-a0"
            await ingestor.ingest(record(name, trajectory(name, version=version)))
        await ingestor.add_checkpoint(PLANNER, 0, 2, "digest", "path")
        batch = await ingestor.take(PLANNER, 1, Version(0, 4), 1)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 5, 0)
        deleted = await ingestor.prune()
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 2))
        taken = await ingestor.take(PLANNER, 1, Version(incarnation, 2), 0.01)
        return deleted, taken, (await ingestor.stats())[PLANNER]["dropped"]

    assert with_ingestor(tmp_path, scenario) == (0, None, {"rolled_back": 2})


def test_a_group_larger_than_a_step_of_pruning_is_pruned_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_prune, "_STEP", 1)

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await _train(ingestor, 1, [0, 1])
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
        return await ingestor.prune(), (await ingestor.stats())[PLANNER]["trained"]

    assert with_ingestor(tmp_path, scenario) == (4, 4)


def test_dropped_and_recorded_rows_are_pruned_and_waiting_ones_never(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_queue_groups=1), True)
        await ingestor.register_policy(SOLVER, queue_spec(), False)
        for task in range(2):
            await finish_task(ingestor, task, models=(PLANNER, SOLVER))
        await ingestor.prune()
        return _kept(tmp_path), await ingestor.stats()

    kept, stats = with_ingestor(tmp_path, scenario)
    assert kept == {"e0-t1"}
    assert stats[PLANNER]["dropped"] == {"surplus": 2} and stats[PLANNER]["queued"] == 2
    assert stats[SOLVER]["recorded"] == 4


def test_the_task_cursor_survives_pruning(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), False)
        for task in (0, 3, 17):
            await finish_task(ingestor, task)
        await ingestor.issue("e1-t2-s0-a0", 2)
        await ingestor.prune()
        await finish_task(ingestor, 40)
        await ingestor.prune()
        return await ingestor.issued_tasks()

    assert with_ingestor(tmp_path, scenario) == {0: {0, 3, 17, 40}, 1: {2}}
    assert _kept(tmp_path) == set()


def test_after_pruning_behind_a_checkpoint_the_policy_cannot_start_from_nothing(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await _train(ingestor, 1, [1])
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
        await ingestor.prune()
        with pytest.raises(ValueError, match="pruned behind the checkpoints of planner_model"):
            await ingestor.register_policy(PLANNER, queue_spec(), True)
        return await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))

    assert with_ingestor(tmp_path, scenario) == 1
