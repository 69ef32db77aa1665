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
"""Admission: what waits for room in training, and for whom (invariant 10 of design.md)."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.multi_policy_async.multi_model_gateway_router import IngestorSink
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    has_room,
    queue_spec,
    record,
    stats_of,
    trajectory,
    with_ingestor,
)
from recipe.multi_policy_async.trajectory import Version

V0 = Version(0, 0)


def test_admission_waits_at_the_lead_and_goes_on_when_a_new_version_takes(tmp_path):
    """A consumed group still runs ahead of the served weights until the trainer takes at a newer version."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=2), True)
        rooms = []
        for task in range(2):
            rooms.append(await ingestor.admit(0, task, 2, 0.01))
            await finish_task(ingestor, task)
        rooms.append(await ingestor.admit(0, 2, 2, 0.01))
        batch = await ingestor.take(PLANNER, 2, V0, 1)
        rooms.append(has_room(ingestor))
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        rooms.append(has_room(ingestor))
        waiting = asyncio.create_task(ingestor.admit(0, 2, 2, 5))
        assert await ingestor.take(PLANNER, 2, Version(0, 1), 0.01) is None
        rooms.append(await waiting)
        return rooms

    assert with_ingestor(tmp_path, scenario) == [True, True, False, False, False, True]


@pytest.mark.parametrize(("rule", "room"), [("any", True), ("all", False)])
def test_a_full_policy_stops_admission_alone_only_under_the_rule_all(tmp_path, rule, room):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=1), True)
        await ingestor.register_policy(SOLVER, queue_spec(max_lead_groups=8), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        return has_room(ingestor)

    assert with_ingestor(tmp_path, scenario, admission=rule) is room


@pytest.mark.parametrize("most", [None, 3])
def test_a_task_that_was_started_below_the_lead_makes_no_surplus_unless_the_queue_is_given_a_size(tmp_path, most):
    """Two agents of one policy: two groups wait, which is below a lead of three, and the next task brings two more."""

    async def scenario(ingestor):
        spec = queue_spec(max_lead_groups=3, max_queue_groups=most)
        await ingestor.register_policy(PLANNER, spec, True, groups_per_task=2.0)
        for task in range(2):
            assert await ingestor.admit(0, task, 2, 0)
            for sample in range(2):
                name = f"e0-t{task}-s{sample}-a0"
                await ingestor.issue(name, 2)
                await ingestor.ingest(record(name, *(trajectory(name, agent_id=agent) for agent in ("a", "b"))))
        return has_room(ingestor), (await stats_of(ingestor))["dropped"]

    assert with_ingestor(tmp_path, scenario, admission="all") == (False, {} if most is None else {"surplus": 2})


@pytest.mark.parametrize("how", ["frozen", "retired", "paused"])
@pytest.mark.parametrize("rule", ["any", "all"])
def test_a_policy_that_cannot_train_now_has_no_say_in_admission(tmp_path, how, rule):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=1), how != "frozen")
        await ingestor.register_policy(SOLVER, queue_spec(max_lead_groups=2), True)
        if how == "retired":
            await ingestor.retire(PLANNER)
        if how == "paused":
            await ingestor.pause(PLANNER)
        rooms = []
        for task in range(2):
            rooms.append(has_room(ingestor))
            await finish_task(ingestor, task, models=(PLANNER, SOLVER))
        return [*rooms, has_room(ingestor)]

    assert with_ingestor(tmp_path, scenario, admission=rule) == [True, True, False]


def test_a_policy_that_gets_no_groups_is_warned_of_and_starves_at_its_limit(tmp_path, caplog):
    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(idle_tasks_limit=70), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        for task in range(1, 70):
            await finish_task(ingestor, task)
        idle = {model_id: each["idle_tasks"] for model_id, each in (await ingestor.stats()).items()}
        before = await ingestor.starving()
        await finish_task(ingestor, 70)
        at_limit = await ingestor.starving()
        await ingestor.retire(SOLVER)
        return idle, before, at_limit, await ingestor.starving()

    idle, before, at_limit, retired = with_ingestor(tmp_path, scenario)
    assert idle == {PLANNER: 0, SOLVER: 69} and before is None and retired is None
    assert at_limit.startswith("policy solver_model got no group from the last 70 tasks")
    warnings = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].startswith("policy solver_model got no group from the last 64 tasks")


@pytest.mark.parametrize("how", ["frozen", "retired", "paused", "without a limit"])
def test_a_policy_that_need_not_train_never_starves(tmp_path, how):
    async def scenario(ingestor):
        limit = None if how == "without a limit" else 1
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await ingestor.register_policy(SOLVER, queue_spec(idle_tasks_limit=limit), how != "frozen")
        if how == "retired":
            await ingestor.retire(SOLVER)
        if how == "paused":
            await ingestor.pause(SOLVER)
        for task in range(3):
            await finish_task(ingestor, task)
        return await ingestor.starving()

    assert with_ingestor(tmp_path, scenario) is None


def test_a_policy_is_hungry_while_its_trainer_waits_for_more_than_is_queued(tmp_path):
    """What lets its calls at once grow (gateway/concurrency.py): else one group in the queue would stop that."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        sink = IngestorSink(SimpleNamespace(stats=SimpleNamespace(remote=ingestor.stats)))
        found = []
        for task in range(3):
            found.append((await sink.hungry())[PLANNER])
            await finish_task(ingestor, task)
            found.append((await sink.hungry())[PLANNER])
            await ingestor.take(PLANNER, 2, V0, 0)
        return found

    assert with_ingestor(tmp_path, scenario) == [True, False, True, True, True, False]


def test_admission_learns_how_rarely_a_policy_is_called(tmp_path):
    """Else a policy that one task in many calls would count every open task as a group of its own."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_lead_groups=2), True)
        for task in range(30):
            await finish_task(ingestor, task, models=())
        for task in range(30, 60):
            await ingestor.admit(0, task, 2, 1)
        return await stats_of(ingestor)

    assert with_ingestor(tmp_path, scenario)["lead_groups"] < 2
