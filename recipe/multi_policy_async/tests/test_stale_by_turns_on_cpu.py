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
"""Rows lost as stale are told apart by turns, so that it is seen when long conversations are what gets lost."""

import sqlite3
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from ..ingest.turns import TURNS_CLASS, label, turns_class
from ..ledger import main
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, finish_task, queue_spec, record, stats_of, trajectory, with_ingestor


async def _play(ingestor, task: int, *, rows: int = 1, calls: int = 0, version: int) -> None:
    """Two workflows whose planner leaves ``rows`` rows, each of ``calls`` merged calls if any."""
    ids = [f"e0-t{task}-s{sample}-a0" for sample in range(2)]
    metadata = {"calls": [{"turn": turn} for turn in range(calls)]}
    for workflow_id in ids:
        await ingestor.issue(workflow_id, 2)
    for workflow_id in ids:
        own = (trajectory(workflow_id, row=row, version=version, metadata=metadata) for row in range(rows))
        await ingestor.ingest(record(workflow_id, *own))


async def _one_turn_is_trained_and_long_ones_are_stale(ingestor):
    """At version 3 and within one version; the long ones were sampled by version 0."""
    await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True)
    await _play(ingestor, 0, version=3)
    await _play(ingestor, 1, rows=5, version=0)
    await _play(ingestor, 2, calls=20, version=0)
    batch = await ingestor.take(PLANNER, 1, Version(0, 3), 1)
    await ingestor.mark_consumed(PLANNER, batch.batch_id, 4, 0)
    return batch


BY_TURNS = {
    "1": {"trained": 2, "stale": 0},
    "5-8": {"trained": 0, "stale": 10},
    "17+": {"trained": 0, "stale": 2},
}


def test_what_is_lost_as_stale_is_told_by_turns_and_outlives_the_process_and_pruning(tmp_path, capsys):
    async def counts(ingestor):
        return (await stats_of(ingestor))["by_turns"]

    async def before(ingestor):
        await _one_turn_is_trained_and_long_ones_are_stale(ingestor)
        return await counts(ingestor)

    async def after(ingestor):
        await ingestor.add_checkpoint(PLANNER, 0, 4, "digest", "path")  # needs no row
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True, restored=(0, 4))
        known, deleted = await counts(ingestor), await ingestor.prune()
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True, restored=(0, 4))
        return known, deleted, await counts(ingestor)

    assert with_ingestor(tmp_path, before) == BY_TURNS
    assert with_ingestor(tmp_path, after) == (BY_TURNS, 14, BY_TURNS)
    assert main([str(tmp_path)]) == 0
    table = capsys.readouterr().out.split("Stale, by turns of the agent in its workflow\n")[1].split("\n\n")[0]
    assert [line.split()[1:] for line in table.splitlines()] == [
        ["turns", "trained", "stale", "stale_share"],
        ["1", "2", "0", "0.0"],
        ["5-8", "0", "10", "1.0"],
        ["17+", "0", "2", "1.0"],
    ]


def test_a_batch_tells_the_trainer_which_share_was_stale_by_turns(tmp_path):
    async def scenario(ingestor):
        await _one_turn_is_trained_and_long_ones_are_stale(ingestor)
        await _play(ingestor, 3, rows=5, version=4)
        again = await ingestor.take(PLANNER, 1, Version(0, 4), 1)
        await ingestor.mark_consumed(PLANNER, again.batch_id, 5, 0)
        await finish_task(ingestor, 4, version=5)
        return (await ingestor.take(PLANNER, 1, Version(0, 5), 1)).stale_shares

    assert with_ingestor(tmp_path, scenario) == {"1": 0.0, "5-8": 0.5, "17+": 1.0}


def test_what_lost_weights_trained_is_no_longer_counted_as_trained(tmp_path):
    async def scenario(ingestor):
        await _one_turn_is_trained_and_long_ones_are_stale(ingestor)
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True)
        return (await stats_of(ingestor))["by_turns"]

    assert with_ingestor(tmp_path, scenario) == {turns: BY_TURNS[turns] for turns in ("5-8", "17+")}


@given(turns=st.integers(1, 10_000))
def test_there_are_six_classes_of_turns_and_file_and_memory_agree_on_them(turns):
    assert turns_class(turns) <= turns and label(turns_class(turns)) in ("1", "2", "3-4", "5-8", "9-16", "17+")
    with closing(sqlite3.connect(":memory:")) as database:
        (found,) = database.execute(f"SELECT {TURNS_CLASS} FROM (SELECT ?1 AS turns)", (turns,)).fetchone()
    assert found == turns_class(turns)
