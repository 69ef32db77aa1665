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
"""When a policy waits with a batch or with a version, and how old its partners were (invariant 6 of design.md)."""

import asyncio

import pytest

from recipe.multi_policy_async.simulator import virtual_time
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    ingest_spec,
    queue_spec,
    record,
    stats_of,
    trajectory,
    with_ingestor,
)
from recipe.multi_policy_async.trajectory import Version, VersionSpan
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor

V0 = Version(0, 0)


def test_holding_needs_a_bound():
    with pytest.raises(ValueError, match="on_stale: hold needs a bound"):
        queue_spec(on_stale="hold")


async def _held(ingestor, version: int, *, groups: int = 1, batches_left: int = 0) -> bool:
    return not await ingestor.hold(PLANNER, groups, Version(0, version), batches_left, 0)


def test_a_policy_holds_its_batch_until_the_group_that_its_next_version_would_make_stale_is_closed(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1, on_stale="hold"), True)
        await ingestor.take(PLANNER, 1, V0, 0)
        for sample in range(2):
            await ingestor.issue(f"e0-t0-s{sample}-a0", 2, 30.0)
        await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", version=0)))
        held = [await _held(ingestor, 0), await _held(ingestor, 1)]
        holding = asyncio.create_task(ingestor.hold(PLANNER, 1, Version(0, 1), 0, 10))
        await asyncio.sleep(0.01)
        held.append(not holding.done())
        await ingestor.ingest(record("e0-t0-s1-a0", trajectory("e0-t0-s1-a0", version=1)))
        batch = await ingestor.take(PLANNER, 1, Version(0, 1), 0)
        return held, await holding, (await stats_of(ingestor))["held_s"] > 0, len(batch.groups)

    assert with_ingestor(tmp_path, scenario) == ([False, True, True], True, True, 1)


async def _issue_tasks(ingestor, tasks: int, version: int) -> None:
    """Tasks of two workflows each, issued while ``version`` is served; the first workflow of each has ended."""
    await ingestor.take(PLANNER, 9, Version(0, version), 0)
    for task in range(tasks):
        for sample in range(2):
            await ingestor.issue(f"e0-t{task}-s{sample}-a0", 2, 30.0)
        await ingestor.ingest(record(f"e0-t{task}-s0-a0", trajectory(f"e0-t{task}-s0-a0", version=version)))


async def _close(ingestor, task: int, version: int) -> None:
    await ingestor.ingest(record(f"e0-t{task}-s1-a0", trajectory(f"e0-t{task}-s1-a0", version=version)))


def test_a_batch_that_such_groups_fill_is_not_held_for_more_of_them(tmp_path):
    """Else a policy whose tasks never stop coming would hold for ever."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=0, on_stale="hold"), True)
        await _issue_tasks(ingestor, 3, version=0)
        held = []
        for task in range(2):
            held.append(await _held(ingestor, 0, groups=2))
            await _close(ingestor, task, version=0)
        return [*held, await _held(ingestor, 0, groups=2)]

    assert with_ingestor(tmp_path, scenario) == [True, True, False]


@pytest.mark.parametrize(("tasks", "held"), [(2, False), (3, True)])
def test_a_batch_is_held_only_for_more_groups_than_the_versions_later_batches_can_take(tmp_path, tasks, held):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=0, on_stale="hold"), True)
        await _issue_tasks(ingestor, tasks, version=0)
        return await _held(ingestor, 0, groups=2, batches_left=1)

    assert with_ingestor(tmp_path, scenario) is held


def test_without_staleness_a_small_batch_is_held_for_what_began_after_the_trainer_asked_and_for_nothing_later(tmp_path):
    """Under ``max_staleness: 0`` nothing is in play yet when a trainer asks to hold, so asking once held nothing."""

    async def scenario(ingestor):
        spec = queue_spec(max_staleness=0, on_stale="hold", min_batch_groups=1, coalesce_s=0.0)
        await ingestor.register_policy(PLANNER, spec, True)
        assert not await _held(ingestor, 0, groups=4)
        await _issue_tasks(ingestor, 2, version=0)
        await _close(ingestor, 0, version=0)
        held = await ingestor.take(PLANNER, 4, V0, 0)
        await ingestor.issue("e0-t2-s0-a0", 2, 30.0)
        await _close(ingestor, 1, version=0)
        batch = await ingestor.take(PLANNER, 4, V0, 0)
        return held, [group.group_id for group in batch.groups]

    assert with_ingestor(tmp_path, scenario) == (None, ["e0-t0/planner", "e0-t1/planner"])


def test_workflows_that_begin_while_a_batch_is_held_do_not_prolong_it(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=0, on_stale="hold", min_batch_groups=1), True)
        await _issue_tasks(ingestor, 1, version=0)
        held = [await _held(ingestor, 0, groups=4)]
        await ingestor.issue("e0-t2-s0-a0", 2, 30.0)
        await _close(ingestor, 0, version=0)
        return [*held, await _held(ingestor, 0, groups=4)]

    assert with_ingestor(tmp_path, scenario) == [True, False]


def test_a_group_that_is_stale_already_is_not_waited_for(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1, on_stale="hold"), True)
        await _issue_tasks(ingestor, 1, version=0)
        return [await _held(ingestor, version) for version in (1, 2)]

    assert with_ingestor(tmp_path, scenario) == [True, False]


def test_a_task_holds_with_the_oldest_of_its_workflows_also_if_a_younger_one_began_later(tmp_path):
    """Workflows of a task wait for slots, or are tried again, so they begin under different versions."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1, on_stale="hold"), True)
        for version in (4, 5):
            await ingestor.take(PLANNER, 1, Version(0, version), 0)
            await ingestor.issue(f"e0-t0-s{version - 4}-a0", 2, 30.0)
        return await _held(ingestor, 5)

    assert with_ingestor(tmp_path, scenario) is True


def test_groups_with_the_oldest_tokens_are_trained_first(tmp_path):
    """A task whose workflows take long closes late; in closing order it would become stale behind younger groups."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1), True)
        await _issue_tasks(ingestor, 2, version=0)
        await _close(ingestor, 1, version=1)
        for sample in range(2):
            await ingestor.issue(f"e0-t7-s{sample}-a0", 2, 30.0)
            await ingestor.ingest(record(f"e0-t7-s{sample}-a0", trajectory(f"e0-t7-s{sample}-a0", version=1)))
        await _close(ingestor, 0, version=1)
        batch = await ingestor.take(PLANNER, 2, Version(0, 1), 0)
        return [group.group_id.split("/")[0] for group in batch.groups]

    assert with_ingestor(tmp_path, scenario) == ["e0-t1", "e0-t0"]


@pytest.mark.parametrize(("rule", "remedy"), [("drop", "set on_stale: hold"), ("hold", "lower its lead")])
def test_a_policy_that_loses_over_half_of_its_groups_as_stale_warns_with_the_times_behind_it(
    tmp_path, caplog, rule, remedy
):
    """Every version takes 30 s, every workflow 25 s, and two of three groups are too old."""
    clock = [0.0]

    async def scenario():
        ingestor = TrajectoryIngestor(tmp_path / "ledger.sqlite", ingest_spec(), clock=lambda: clock[0])
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1, on_stale=rule, min_group_size=1), True)
        for number in range(3, 19):
            lags = {f"e0-t{10 * number + i}-s0-a0": lag for i, lag in enumerate((1, 2, 2))}
            for workflow_id in lags:
                await ingestor.issue(workflow_id, 1)
            clock[0] += 25.0
            for workflow_id, lag in lags.items():
                await ingestor.ingest(record(workflow_id, trajectory(workflow_id, version=number - lag)))
            clock[0] += 5.0
            await ingestor.hold(PLANNER, 1, Version(0, number), 0, 0)  # as every trainer does before a batch
            batch = await ingestor.take(PLANNER, 1, Version(0, number), 0)
            await ingestor.mark_consumed(PLANNER, batch.batch_id, number + 1, 0)
        await ingestor.close()

    asyncio.run(scenario())
    (message,) = [each.getMessage() for each in caplog.records if "stale" in each.getMessage()]
    assert "lost 22 of its last 33 groups" in message
    assert "a workflow takes 25 s, a version 30 s, and max_staleness is 1; raise it, " + remedy in message


def test_a_workflow_holds_with_the_version_that_was_served_when_it_was_issued(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=1, on_stale="hold"), True)
        await ingestor.take(PLANNER, 1, Version(0, 4), 0)
        await ingestor.issue("e0-t0-s0-a0", 1, 30.0)
        return [await _held(ingestor, version) for version in (4, 5)]

    assert with_ingestor(tmp_path, scenario) == [False, True]


@pytest.mark.parametrize("deadline_s", [None, 0.05])
def test_a_workflow_holds_nobody_after_its_deadline(tmp_path, deadline_s):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=0, on_stale="hold"), True)
        await ingestor.take(PLANNER, 1, V0, 0)
        await ingestor.issue("e0-t0-s0-a0", 1, deadline_s)
        return await ingestor.hold(PLANNER, 1, V0, 0, 10)

    assert with_ingestor(tmp_path, scenario, run=virtual_time.run) is True


def test_a_policy_that_drops_or_has_retired_or_whose_data_ended_is_never_held(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_staleness=0, on_stale="hold"), True)
        await ingestor.register_policy(SOLVER, queue_spec(max_staleness=0), True)
        for model_id in (PLANNER, SOLVER):
            await ingestor.take(model_id, 1, V0, 0)
        await ingestor.issue("e0-t0-s0-a0", 1, 30.0)
        answers = [await ingestor.hold(SOLVER, 1, V0, 0, 0), await _held(ingestor, 0)]
        await ingestor.end_of_data()
        answers.append(await _held(ingestor, 0))
        return answers

    assert with_ingestor(tmp_path, scenario) == [True, True, False]


async def _serving(ingestor, model_id: str) -> None:
    await ingestor.register_policy(model_id, queue_spec(), True)
    await ingestor.may_publish(model_id, V0, 0)
    await ingestor.synced(model_id)


def test_while_versions_are_pinned_no_policy_publishes_and_what_is_on_its_way_arrives_first(tmp_path):
    """Also after the data has ended, when the last versions are published."""

    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await _serving(ingestor, model_id)
        assert await ingestor.may_publish(PLANNER, Version(0, 1), 0), "it publishes version 1 now"
        pinned = [await ingestor.pin_versions(100, 0)]
        pinning = asyncio.create_task(ingestor.pin_versions(100, 10))
        await ingestor.synced(PLANNER)
        pinned.append(await pinning)
        waiting = asyncio.create_task(ingestor.may_publish(SOLVER, Version(0, 1), 10))
        await asyncio.sleep(0)
        allowed = [await ingestor.may_publish(PLANNER, Version(0, 2), 0), waiting.done()]
        await ingestor.end_of_data()
        allowed.append(await ingestor.may_publish(PLANNER, Version(0, 2), 0))
        await ingestor.unpin_versions()
        return pinned, allowed, await waiting, await ingestor.may_publish(PLANNER, Version(0, 2), 0)

    assert with_ingestor(tmp_path, scenario) == ([False, True], [False, False, False], True, True)


def test_a_policy_that_retires_after_its_last_version_publishes_no_more(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await ingestor.may_publish(PLANNER, Version(0, 1), 0)
        await ingestor.retire(PLANNER)
        return await ingestor.pin_versions(100, 0)

    assert with_ingestor(tmp_path, scenario)


def test_a_policy_that_starts_again_during_a_pin_opens_its_gate(tmp_path):
    """Else workflows of the evaluation would wait for it, and it for the end of the evaluation."""

    async def scenario(ingestor):
        await _serving(ingestor, PLANNER)
        await ingestor.pin_versions(100, 0)
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        return [await ingestor.may_publish(PLANNER, Version(1, number), 0) for number in (0, 1)]

    assert with_ingestor(tmp_path, scenario) == [True, False]


@pytest.mark.parametrize("released_by", ["time", "a dead producer"])
def test_a_pin_holds_nobody_for_ever(tmp_path, released_by):
    async def scenario(ingestor):
        await _serving(ingestor, PLANNER)
        await ingestor.pin_versions(0.05 if released_by == "time" else 1000, 0)
        if released_by != "time":
            await ingestor.producer_died("killed")
        return await ingestor.may_publish(PLANNER, Version(0, 1), 10)

    assert with_ingestor(tmp_path, scenario, run=virtual_time.run)


@pytest.mark.parametrize(("at", "ages"), [(Version(0, 5), [3, 3]), (Version(1, 1), [0, 0])], ids=["on", "restored"])
def test_a_batch_tells_how_many_versions_each_partner_has_made_since_its_workflows_were_played(tmp_path, at, ages):
    """Partners that are frozen, or did not take part, are not named; one that was restored is not ahead."""

    def played(workflow_id, **oldest):
        span = {f"{agent}_model": VersionSpan(Version(0, v), Version(0, v + 1)) for agent, v in oldest.items()}
        return record(workflow_id, trajectory(workflow_id), version_vector=span)

    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
        await ingestor.register_policy("judge_model", queue_spec(), False)
        for task, oldest in enumerate(({"planner": 0, "solver": 2, "judge": 0}, {"planner": 1})):
            ids = [f"e0-t{task}-s{sample}-a0" for sample in range(2)]
            for workflow_id in ids:
                await ingestor.issue(workflow_id, 2)
            for workflow_id in ids:
                await ingestor.ingest(played(workflow_id, **oldest))
        await ingestor.may_publish(SOLVER, at, 0)
        return (await ingestor.take(PLANNER, 2, Version(0, 1), 1)).partner_staleness

    assert with_ingestor(tmp_path, scenario) == {SOLVER: ages}
