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
"""TrajectoryIngestor: what is acknowledged, refused and dropped, and how rows become groups (invariants 3, 4, 10)."""

import asyncio

import numpy as np
import pytest

from recipe.multi_policy_async.ingest.batch_source import TakenBatch
from recipe.multi_policy_async.ingest.ledger_report import abandoned_tokens, open_ledger
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
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


def test_the_same_record_again_gets_the_first_answer_and_adds_nothing(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        rows = [trajectory("e0-t0-s0-a0"), trajectory("e0-t0-s0-a0", model=SOLVER), trajectory("e0-t0-s0-a0", row=1)]
        answers = [await ingestor.ingest(record("e0-t0-s0-a0", *rows, score=1.0)) for _ in range(2)]
        return answers, (await stats_of(ingestor))["accepted"]

    answers, accepted = with_ingestor(tmp_path, scenario)
    assert answers == [{PLANNER: 2, SOLVER: 1}] * 2 and accepted == 2


@pytest.mark.parametrize(
    "other",
    [
        {"reward": 0.0},
        {"log_probs": np.array([-0.25, 0.0, -1.25], dtype=np.float32)},
        {"response_ids": np.array([7, 8, 1], dtype=np.int32)},
        {"versions": np.array([0, -1, 1], dtype=np.int32)},
        {"prompt_ids": np.array([5, 6, 7], dtype=np.int32)},
    ],
)
def test_the_same_id_with_other_content_is_refused(tmp_path, other):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0")))
        with pytest.raises(ValueError, match="e0-t0-s0-a0.*other content"):
            await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", **other)))
        return (await stats_of(ingestor))["accepted"]

    assert with_ingestor(tmp_path, scenario) == 1


def test_timings_and_metadata_do_not_make_a_record_another_one(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        for seconds in (1.0, 22.5):
            row = trajectory("e0-t0-s0-a0", metadata={"seconds": seconds})
            await ingestor.ingest(record("e0-t0-s0-a0", row, ended_at=seconds))

    with_ingestor(tmp_path, scenario)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": "stranger"}, "policy 'stranger'; known: planner_model, solver_model"),
        ({"workflow_id": "e9-t9-s9-a9"}, "is of workflow e9-t9-s9-a9"),
        ({"reward": None}, "has no reward"),
        ({"reward": float("nan")}, "has reward nan"),
        ({"reward": -1e39}, "has reward -1e"),
        ({"response_mask": np.zeros(3, dtype=np.uint8)}, "no sampled token"),
    ],
)
def test_a_record_that_cannot_be_accounted_for_is_refused_with_the_workflow_id(tmp_path, change, message):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        with pytest.raises(ValueError, match=f"workflow e0-t0-s0-a0.*{message}"):
            await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", **change)))
        return workflow_stats(ingestor)

    assert with_ingestor(tmp_path, scenario)["in_flight"] == 1


def test_a_workflow_that_was_never_issued_is_refused(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        with pytest.raises(ValueError, match="never issued"):
            await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0")))

    with_ingestor(tmp_path, scenario)


def test_only_one_attempt_of_a_sample_becomes_terminal(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        first, second = "e0-t0-s0-a0", "e0-t0-s0-a1"
        assert await ingestor.issue(first, 1) == await ingestor.issue(second, 1) == "issued"
        late = await ingestor.ingest(record(first, trajectory(first)))
        kept = await ingestor.ingest(record(second, trajectory(second)))
        again = await ingestor.issue("e0-t0-s0-a2", 1)
        await ingestor.issue("e0-t1-s0-a1", 1)
        with pytest.raises(ValueError, match="later attempt"):
            await ingestor.issue("e0-t1-s0-a0", 1)
        return late, kept, again, (await stats_of(ingestor))["accepted"]

    assert with_ingestor(tmp_path, scenario) == ({}, {PLANNER: 1}, "terminal", 1)


def test_a_superseded_attempt_that_is_handed_in_again_is_counted_once(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        first, second = "e0-t0-s0-a0", "e0-t0-s0-a1"
        for workflow_id in (first, second):
            await ingestor.issue(workflow_id, 1)
        for _ in range(2):  # the first answer was lost
            await ingestor.ingest(record(first, trajectory(first)))

    with_ingestor(tmp_path, scenario)
    with open_ledger(tmp_path / "ledger.sqlite") as db:
        assert abandoned_tokens(db) == [{"model_id": PLANNER, "reason": "superseded", "sampled_tokens": 2}]


def test_a_group_that_is_too_small_is_dropped_with_its_reason(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        for sample in range(3):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 3)
        await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0"), trajectory("e0-t0-s0-a0", model=SOLVER)))
        await ingestor.ingest(record("e0-t0-s1-a0", trajectory("e0-t0-s1-a0")))
        await ingestor.ingest(record("e0-t0-s2-a0", status="no_calls"))
        return (await stats_of(ingestor))["dropped"], (await stats_of(ingestor, SOLVER))["dropped"]

    assert with_ingestor(tmp_path, scenario) == ({}, {"group_too_small": 1})


@pytest.mark.parametrize(
    ("status", "change", "rules", "reason"),
    [
        ("failed", {}, {}, "failed_workflow"),
        ("failed", {"reward": None}, {"on_failed": "keep"}, "failed_workflow"),
        ("failed", {}, {"on_failed": "keep"}, None),
        ("aborted", {"reward": None}, {"on_failed": "keep"}, "failed_workflow"),
        ("ok", {"finish_reason": "length"}, {}, None),
        ("ok", {"finish_reason": "length"}, {"on_truncated": "drop"}, "truncated"),
        ("ok", {"metadata": {"truncated": True}}, {"on_truncated": "drop"}, "truncated"),  # in an earlier turn
        ("ok", {"metadata": {"constrained": True}}, {}, "constrained"),
        ("ok", {"log_probs": np.array([np.nan, 0, 0], dtype=np.float32)}, {}, "non_finite"),
    ],
)
def test_rows_that_must_not_be_trained_are_dropped_by_rule(tmp_path, status, change, rules, reason):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(min_group_size=1), True)
        await ingestor.issue("e0-t0-s0-a0", 1)
        await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", **change), status=status))
        return await stats_of(ingestor)

    stats = with_ingestor(tmp_path, scenario, **rules)
    assert stats["dropped"] == ({reason: 1} if reason else {})
    assert stats["queue_groups"] == (0 if reason else 1)


def test_rows_of_a_frozen_policy_are_recorded_and_never_queued(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=None), False)
        await ingestor.register_policy(SOLVER, queue_spec(), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        return await stats_of(ingestor), await stats_of(ingestor, SOLVER)

    frozen, trained = with_ingestor(tmp_path, scenario)
    assert (frozen["accepted"], frozen["recorded"], frozen["queue_groups"]) == (2, 2, 0)
    assert (trained["accepted"], trained["recorded"], trained["queue_groups"]) == (2, 0, 1)


@pytest.mark.parametrize(
    ("group_by", "groups"),
    [
        ("task_agent", {"e0-t0/a": ("a", 4), "e0-t0/b": ("b", 2)}),
        ("task_agent_turn", {"e0-t0/a/0": ("a", 2), "e0-t0/a/1": ("a", 2), "e0-t0/b/0": ("b", 2)}),
        ("task", {"e0-t0": ("", 6)}),
    ],
)
def test_groups_are_cut_as_configured(tmp_path, group_by, groups):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(group_by=group_by), True)
        for sample in range(2):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 2)
        for sample in range(2):
            name = f"e0-t0-s{sample}-a0"
            rows = [trajectory(name, agent_id=agent, row=row) for agent, row in (("a", 0), ("a", 1), ("b", 0))]
            await ingestor.ingest(record(name, *rows))
        return await ingestor.take(PLANNER, len(groups), V0, 1)

    batch = with_ingestor(tmp_path, scenario)
    assert {g.group_id: (g.agent_id, len(g.trajectories)) for g in batch.groups} == groups


def test_a_trained_policy_without_a_lead_is_a_clear_error(tmp_path):
    async def scenario(ingestor):
        with pytest.raises(ValueError, match="planner_model.*max_lead_groups"):
            await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=None), True)
        with pytest.raises(ValueError, match="'nobody' is not registered; registered: none"):
            await ingestor.take("nobody", 1, V0, 1)

    with_ingestor(tmp_path, scenario)
