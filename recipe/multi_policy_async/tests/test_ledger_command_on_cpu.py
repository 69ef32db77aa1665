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
"""The ledger's command line."""

import json

import pyarrow.parquet as pq
import pytest

from ..ingest.ledger_report import open_ledger, row_counts, workflow_counts
from ..ledger import main
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, SOLVER, finish_task, queue_spec, record, trajectory, with_ingestor


@pytest.fixture
def run_dir(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_queue_groups=1), True)
        await ingestor.register_policy(SOLVER, queue_spec(), False)
        for task in range(3):
            await finish_task(ingestor, task, models=(PLANNER, SOLVER))
        batch = await ingestor.take(PLANNER, 1, Version(0, 0), 1)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        await ingestor.add_checkpoint(PLANNER, 0, 1, "abc", "checkpoints/1")
        await ingestor.issue("e0-t3-s0-a0", 2)
        await ingestor.issue("e0-t3-s0-a1", 2)
        await ingestor.ingest(record("e0-t3-s0-a0", trajectory("e0-t3-s0-a0")))
        await ingestor.issue("e0-t3-s1-a0", 2)
        await ingestor.ingest(record("e0-t3-s1-a0", trajectory("e0-t3-s1-a0"), score=0.5, started_at=1.0))

    with_ingestor(tmp_path, scenario)
    return tmp_path


def _table(text: str, title: str) -> list[list[str]]:
    block = text.split(f"{title}\n")[1].split("\n\n")[0]
    return [line.split() for line in block.splitlines()[1:]]


def test_counts_per_policy_and_reason(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert _table(text, "Rows") == [
        [PLANNER, "surplus", "4", "8"],
        [PLANNER, "trained", "2", "4"],
        [PLANNER, "waiting", "1", "2"],
        [SOLVER, "recorded", "6", "12"],
    ]
    assert _table(text, "Abandoned before they were rows") == [[PLANNER, "superseded", "2"]]
    assert _table(text, "Workflows") == [["in", "flight", "1"], ["ok", "7"], ["superseded", "1"]]
    assert _table(text, "Checkpoints") == [[PLANNER, "0", "1", "checkpoints/1", "abc"]]


def test_counts_are_the_same_after_pruning(run_dir, capsys):
    main([str(run_dir)])
    before = capsys.readouterr().out
    with_ingestor(run_dir, lambda ingestor: ingestor.prune())
    main([str(run_dir), "counts"])
    assert capsys.readouterr().out == before


def test_uses_by_replay_are_told_per_policy_and_per_row(tmp_path, capsys):
    async def scenario(ingestor):
        replay = {"max_uses": 2, "max_age": 4, "max_share": 0.5}
        await ingestor.register_policy(PLANNER, queue_spec(coalesce_s=0, replay=replay), True)
        for number in range(2):
            await finish_task(ingestor, number, version=number)
            batch = await ingestor.take(PLANNER, 1 + number, Version(0, number), 1)
            await ingestor.mark_consumed(PLANNER, batch.batch_id, number + 1, 0)

    with_ingestor(tmp_path, scenario)
    assert main([str(tmp_path)]) == 0
    assert _table(capsys.readouterr().out, "Trained again (replay)") == [[PLANNER, "2"]]
    main([str(tmp_path), "workflow", "e0-t0-s0-a0"])
    assert [row["replayed"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1]


def test_the_life_of_one_workflow(run_dir, capsys):
    assert main([str(run_dir / "ledger.sqlite"), "workflow", "e0-t2-s1-a0"]) == 0
    life = json.loads(capsys.readouterr().out)
    assert (life["status"], life["attempts"]) == ("ok", ["e0-t2-s1-a0"])
    trained, recorded = life["rows"]
    assert (trained["fate"], trained["consumed_step"], trained["group_id"]) == ("trained", 1, "e0-t2/planner")
    assert (recorded["fate"], recorded["consumed_step"]) == ("recorded", None)
    main([str(run_dir), "workflow", "e0-t3-s0-a1"])
    assert json.loads(capsys.readouterr().out)["attempts"] == ["e0-t3-s0-a0", "e0-t3-s0-a1"]


def test_export_writes_the_tokens_as_they_were_sampled(run_dir, tmp_path, capsys):
    assert main([str(run_dir), "export", str(tmp_path / "rows.parquet")]) == 0
    assert "13 rows" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    last = rows[-1]
    sent = trajectory("e0-t3-s1-a0")
    assert (last["trajectory_id"], last["fate"], last["reward"], last["score"]) == (sent.trajectory_id, None, 1.0, 0.5)
    for name in ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions"):
        assert last[name] == getattr(sent, name).tolist()


def test_a_ledger_without_a_workflow_says_so_and_exports_no_rows(tmp_path, capsys):
    with_ingestor(tmp_path, lambda ingestor: ingestor.stats())
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing is in the ledger yet: no workflow was started\n"
    assert main([str(tmp_path), "export", str(tmp_path / "rows.parquet")]) == 0
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_an_export_after_pruning_holds_the_rows_that_are_left(run_dir, tmp_path):
    with_ingestor(run_dir, lambda ingestor: ingestor.prune())
    assert main([str(run_dir), "export", str(tmp_path / "rows.parquet")]) == 0
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {row["fate"] for row in rows} <= {None, "trained"} and len(rows) < 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dir}/none"], "there is no ledger at"),
        (["{dir}/other"], "is not a ledger"),
        (["{dir}", "workflow", "e9-t9-s9-a9"], "e9-t9-s9-a9 is not in the ledger: never issued, or pruned"),
        (["{dir}", "export", "{dir}/none/rows.parquet"], "none/rows.parquet"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_dir, capsys, arguments, message):
    (run_dir / "other").write_text("something else, long enough to be no database" * 50)
    assert main([each.format(dir=run_dir) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_its_tables_are_of_one_moment_also_while_a_job_writes(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await finish_task(ingestor, 0)
        with open_ledger(tmp_path / "ledger.sqlite") as db:
            before = row_counts(db)
            await finish_task(ingestor, 1)
            return before, workflow_counts(db)

    rows, workflows = with_ingestor(tmp_path, scenario)
    assert [each["rows"] for each in rows] == [each["workflows"] for each in workflows] == [2]
