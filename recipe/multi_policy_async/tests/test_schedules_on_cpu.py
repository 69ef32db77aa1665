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
"""Schedules: who trains when, and that none of them can block admission for ever."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..ingest.batch_source import TakenBatch
from ..simulator import virtual_time
from ..trajectory import Version
from ..trajectory_ingestor import TrajectoryIngestor
from .fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    has_room,
    ingest_spec,
    loop_time,
    queue_spec,
    record,
    trajectory,
    with_ingestor,
)

MEMBERS = 2


@dataclass
class Policy:
    """How often a policy is called, how large its batches are, where it stops."""

    calls: tuple[int, ...] = (1,)  # rows of a workflow, by task, in turn
    groups: int = 2
    target: int = 4
    speed: int = 1  # loop turns per step
    queue: dict = field(default_factory=dict)


class Play:
    """A producer and one trainer per policy on a real ingestor; ``log`` holds what happened, in order."""

    def __init__(self, path, policies: dict[str, Policy], *, concurrent: int = 2, **spec):
        self.ingestor = TrajectoryIngestor(path / "ledger.sqlite", ingest_spec(**spec), clock=loop_time)
        self.policies = policies
        self.concurrent = concurrent
        self.versions = {model_id: Version(0, 0) for model_id in policies}
        self.log: list[tuple] = []
        self.staleness: list[int] = []
        self.done = asyncio.Event()

    async def run(self) -> None:
        for model_id, policy in self.policies.items():
            spec = queue_spec(**{"max_lead_groups": 2 * policy.groups, "min_group_size": 1} | policy.queue)
            await self.ingestor.register_policy(model_id, spec, True)
        producing = asyncio.create_task(self._produce())
        try:
            await asyncio.gather(*(self._train(model_id) for model_id in self.policies))
        finally:
            self.done.set()
            await producing
            self.stats = await self.ingestor.stats()
            await self.ingestor.close()

    async def _produce(self) -> None:
        running: set[asyncio.Task] = set()
        task = 0
        while not self.done.is_set():
            if len(running) < self.concurrent and await self.ingestor.admit(0, task, MEMBERS, 0.02):
                running.add(asyncio.create_task(self._workflows(task)))
                task += 1
            running = {each for each in running if not each.done()}
            await asyncio.sleep(0)
        await asyncio.gather(*running)

    async def _workflows(self, task: int) -> None:
        self.log.append(("play", task))
        sampled_by = dict(self.versions)
        for sample in range(MEMBERS):
            await self.ingestor.issue(f"e0-t{task}-s{sample}-a0", MEMBERS)
        for sample in range(MEMBERS):
            name = f"e0-t{task}-s{sample}-a0"
            rows = [
                trajectory(name, model=model_id, row=row, version=sampled_by[model_id].number)
                for model_id, policy in self.policies.items()
                for row in range(policy.calls[task % len(policy.calls)])
            ]
            await self.ingestor.ingest(record(name, *rows))
        self.log.append(("played", task))

    async def _train(self, model_id: str) -> None:
        policy = self.policies[model_id]
        while self.versions[model_id].number < policy.target:
            version = self.versions[model_id]
            batch = await self.ingestor.take(model_id, policy.groups, version, 0.05)
            if not isinstance(batch, TakenBatch):
                continue
            self.staleness += [version.number - row.versions[0] for g in batch.groups for row in g.trajectories]
            self.log.append(("train", model_id))
            for _ in range(policy.speed):
                await asyncio.sleep(0)
            after = version._replace(number=version.number + 1)
            await self.ingestor.mark_consumed(model_id, batch.batch_id, after.number, 0)
            self.log.append(("version", model_id))
            self.versions[model_id] = after
        await self.ingestor.retire(model_id)


def play(tmp_path, policies, **spec) -> Play:
    game = Play(tmp_path, policies, **spec)
    virtual_time.run(asyncio.wait_for(game.run(), 20))
    assert all(each["unaccounted"] == 0 for each in game.stats.values())
    return game


def _versions(game: Play) -> list[str]:
    return [model_id for what, model_id in game.log if what == "version"]


@pytest.mark.parametrize("versions", [1, 2])
def test_alternating_policies_train_in_turns_of_some_versions(tmp_path, versions):
    game = play(tmp_path, {"a": Policy(), "b": Policy()}, schedule="alternate", alternate_versions=versions)
    turn = ["a"] * versions + ["b"] * versions
    assert _versions(game) == (turn * 4)[:8]


def test_a_turn_passes_on_when_its_holder_retires(tmp_path):
    policies = {"a": Policy(target=1), "b": Policy(target=6)}
    game = play(tmp_path, policies, schedule="alternate", alternate_versions=3)
    assert _versions(game) == ["a"] + ["b"] * 6


def test_a_turn_passes_on_while_its_holder_is_down(tmp_path):
    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(max_lead_groups=1), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        room = [has_room(ingestor)]  # the planner is at its lead
        before = await ingestor.take(SOLVER, 1, Version(0, 0), 0)
        await ingestor.pause(PLANNER)
        batch = await ingestor.take(SOLVER, 1, Version(0, 0), 0)
        await ingestor.mark_consumed(SOLVER, batch.batch_id, 1, 0)
        await ingestor.take(SOLVER, 1, Version(0, 1), 0)
        return [*room, has_room(ingestor)], before

    assert with_ingestor(tmp_path, scenario, schedule="alternate", admission="all") == ([False, True], None)


def test_a_trainer_whose_turn_comes_need_not_wait_for_another_event(tmp_path):
    """Nothing else happens here: it would wait for the end of its poll, once per turn."""

    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
        await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
        batch = await ingestor.take(PLANNER, 1, Version(0, 0), 0)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        waiting = asyncio.create_task(ingestor.take(SOLVER, 1, Version(0, 0), 60))
        await ingestor.hold(PLANNER, 1, Version(0, 1), 0, 0)  # as every trainer does before a batch
        for _ in range(20):  # the solver looks, and it is not its turn
            await asyncio.sleep(0.001)
        assert await ingestor.take(PLANNER, 1, Version(0, 1), 0) is None
        return await waiting

    assert isinstance(with_ingestor(tmp_path, scenario, schedule="alternate"), TakenBatch)


def _nothing_overlaps(game: Play) -> None:
    playing = training = 0
    for what, _ in game.log:
        playing += {"play": 1, "played": -1}.get(what, 0)
        training += {"train": 1, "version": -1}.get(what, 0)
        assert not (playing and training)


def test_in_rounds_nobody_trains_while_anybody_plays_and_every_sample_is_on_policy(tmp_path):
    policies = {"a": Policy(), "b": Policy(calls=(2,), speed=20)}
    game = play(tmp_path, policies, schedule="sync")
    _nothing_overlaps(game)
    assert set(game.staleness) == {0}


def _rounds(game: Play) -> list[tuple[int, list[str]]]:
    """Per round, the tasks that were played and who trained after them, by name."""
    rounds: list[tuple[int, list[str]]] = []
    for what, who in game.log:
        if what == "play":
            if not rounds or rounds[-1][1]:
                rounds.append((0, []))
            rounds[-1] = rounds[-1][0] + 1, []
        elif what == "train":
            rounds[-1][1].append(who)
    return [(tasks, sorted(trained)) for tasks, trained in rounds]


FLAKY = (1, 1, 0)
"""Two of three tasks bring a group."""


def test_a_round_is_played_until_everybody_has_a_batch_and_not_a_task_longer(tmp_path):
    """What a first guess of one group per task leaves missing is played at once. The other takes larger batches."""
    policies = {"steady": Policy(groups=6, queue={"max_batch_groups": 12}), "flaky": Policy(groups=6, calls=FLAKY)}
    game = play(tmp_path, policies, schedule="sync", concurrent=1)
    assert _rounds(game)[:4] == [(8, ["flaky", "steady"]), *[(9, ["flaky", "steady"])] * 3]
    assert not any(stats["dropped"].keys() - {"retired"} for stats in game.stats.values())


def test_nobody_gets_more_than_its_batch_for_the_sake_of_another_one_which_keeps_what_it_has(tmp_path):
    policies = {"steady": Policy(groups=6, target=8), "flaky": Policy(groups=6, calls=FLAKY)}
    game = play(tmp_path, policies, schedule="sync", concurrent=1)
    assert _rounds(game)[:3] == [(6, ["steady"]), (2, ["flaky"]), (4, ["steady"])]
    assert not any(stats["dropped"].keys() - {"retired"} for stats in game.stats.values())
    assert set(game.staleness) == {0}


@pytest.mark.parametrize("bound", [None, 5])
def test_what_tasks_bring_beyond_their_mean_is_counted_and_never_trained_by_newer_weights(tmp_path, bound):
    """Four tasks at once, of which all or none bring a group; whatever age would be allowed."""
    bursts = Policy(groups=6, calls=(1, 1, 1, 1, 0, 0, 0, 0), target=6, queue={"max_staleness": bound})
    game = play(tmp_path, {"bursts": bursts}, schedule="sync", concurrent=4)
    assert game.stats["bursts"]["dropped"].keys() - {"retired"} == {"round_over"} and set(game.staleness) == {0}


@pytest.mark.parametrize("smallest", [1, None])
def test_a_rare_policy_makes_nobody_play_for_nothing(tmp_path, smallest):
    rare = Policy(calls=(1, 0, 0, 0, 0), groups=8, target=3, queue={"min_batch_groups": smallest, "coalesce_s": 0.0})
    game = play(tmp_path, {"often": Policy(groups=8, target=12), "rare": rare}, schedule="sync")
    assert not any(stats["dropped"].keys() - {"retired"} for stats in game.stats.values())
    assert set(game.staleness) == {0}
    assert max(tasks for tasks, trained in _rounds(game) if "often" in trained) == 8, "the batch of the frequent one"


def test_a_policy_that_nobody_calls_ends_no_round_and_stops_none(tmp_path):
    async def scenario(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(max_lead_groups=4), True)
        task, batches = 0, 0
        while batches < 3 and task < 100:
            version = Version(0, batches)
            batch = await ingestor.take(PLANNER, 2, version, 0)
            assert await ingestor.take(SOLVER, 2, Version(0, 0), 0) is None
            if batch is not None:
                batches += 1
                await ingestor.mark_consumed(PLANNER, batch.batch_id, batches, 0)
            while await ingestor.admit(0, task, MEMBERS, 0):
                await finish_task(ingestor, task, version=batches)
                task += 1
        return batches, task

    assert with_ingestor(tmp_path, scenario, schedule="sync") == (3, 6)


def test_at_their_own_pace_policies_do_overlap(tmp_path):
    """The check above can fail."""
    game = play(tmp_path, {"a": Policy(), "b": Policy(speed=20)}, schedule="all")
    playing = training = 0
    overlaps = 0
    for what, _ in game.log:
        playing += {"play": 1, "played": -1}.get(what, 0)
        training += {"train": 1, "version": -1}.get(what, 0)
        overlaps += bool(playing and training)
    assert overlaps


@pytest.mark.parametrize("schedule", ["all", "alternate", "sync"])
def test_a_policy_that_warms_up_trains_after_its_number_of_tasks(tmp_path, schedule):
    policies = {"a": Policy(), "b": Policy(queue={"start_after_tasks": 6})}
    game = play(tmp_path, policies, schedule=schedule)
    first = game.log.index(("train", "b"))
    assert sum(what == "played" for what, _ in game.log[:first]) >= 6


def test_a_policy_that_warms_up_has_no_turn_yet(tmp_path):
    policies = {"a": Policy(queue={"start_after_tasks": 6}, target=1), "b": Policy(target=6)}
    game = play(tmp_path, policies, schedule="alternate")
    before = game.log[: game.log.index(("train", "a"))]
    assert before.count(("train", "b")) > 1 and "surplus" not in game.stats["b"]["dropped"]


def test_a_policy_that_has_warmed_up_does_not_begin_again_after_a_restart_that_pruned_its_tasks(tmp_path):
    async def before(ingestor):
        await ingestor.register_policy(PLANNER, spec, True)
        for task in range(3):
            await finish_task(ingestor, task)
        batch = await ingestor.take(PLANNER, 3, Version(0, 0), 0)
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
        await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
        assert await ingestor.prune() == 6

    async def after(ingestor):
        await ingestor.register_policy(PLANNER, spec, True, restored=(0, 1))
        await finish_task(ingestor, 3, version=1)
        return await ingestor.take(PLANNER, 1, Version(1, 1), 0)

    spec = queue_spec(start_after_tasks=3)
    with_ingestor(tmp_path, before)
    assert isinstance(with_ingestor(tmp_path, after), TakenBatch)


@pytest.mark.parametrize("schedule", ["all", "alternate", "sync"])
def test_a_job_of_one_policy_that_warms_up_is_not_stuck(tmp_path, schedule):
    play(tmp_path, {"a": Policy(queue={"start_after_tasks": 5, "max_lead_groups": 2})}, schedule=schedule)


RATES = st.sampled_from([(1,), (4,), (2, 1), (1, 0, 0, 0, 0), (0, 3)])


@given(
    schedule=st.sampled_from(["all", "alternate", "sync"]),
    admission=st.sampled_from(["any", "all"]),
    calls=st.lists(RATES, min_size=1, max_size=3),
    groups=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    speeds=st.lists(st.sampled_from([0, 1, 10]), min_size=3, max_size=3),
    concurrent=st.integers(1, 5),
    bound=st.sampled_from([None, 3]),
    by_turn=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_no_schedule_blocks_for_ever(
    tmp_path_factory, schedule, admission, calls, groups, speeds, concurrent, bound, by_turn
):
    """Policies called 0.2 to 4 times per workflow, at any speeds, all reach their target."""
    queue = {"max_staleness": bound, "group_by": "task_agent_turn" if by_turn else "task_agent"}
    policies = {
        f"p{i}": Policy(
            calls=each, groups=groups[i], speed=speeds[i], target=random.Random(i).choice([1, 2, 3]), queue=queue
        )
        for i, each in enumerate(calls)
    }
    game = play(
        tmp_path_factory.mktemp("play"),
        policies,
        schedule=schedule,
        admission=admission,
        alternate_versions=2,
        concurrent=concurrent,
    )
    if schedule == "sync":
        _nothing_overlaps(game)
        assert set(game.staleness) == {0}, "on policy"
