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
"""A dead policy starts again at its newest checkpoint while restarts are left, and nobody else is touched."""

import asyncio
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from ...checkpoint_coordinator import SavedCheckpoint  # noqa: E402
from ...gateway_binding_registry import ModelState, ModelStatus  # noqa: E402
from ...gateway_group import GatewayGroup  # noqa: E402
from ...leftovers import belongs_to  # noqa: E402
from ...model_async_runtime import TrainingOutcome  # noqa: E402
from ...multi_model_metrics import PhaseReport  # noqa: E402
from ...policy_life import PolicyLife  # noqa: E402
from ...supervision import JobFailedError  # noqa: E402
from ...trajectory import Version  # noqa: E402
from ..fakes.gateway_world import binding  # noqa: E402

pytestmark = pytest.mark.slow  # imports Ray

MODEL = "solver_model"
NEWEST = SavedCheckpoint(MODEL, 0, 4, "checkpoints/solver_model/incarnation_0/global_step_4", "digest")


class Remote:
    """A method under an actor's calling convention."""

    def __init__(self, function):
        self.remote = function


class World:
    """Fakes of the parts around one policy; all of them write down what they were asked, in order.

    Args:
        deaths: for each life of the policy: what its training dies of, or ``None``.
    """

    def __init__(self, *deaths, newest=NEWEST, damage=None):
        self.did: list[tuple] = []
        self.notes: list[str] = []
        self._deaths = list(deaths)
        self._newest = newest
        self._damage = damage
        self._incarnations = 0
        self.register_policy = Remote(self._register)
        self.pause = Remote(self._does("pause"))

    def life(self, job, **kwargs) -> PolicyLife:
        return PolicyLife(
            job,
            MODEL,
            ingestor=self,
            gateways=self,
            checkpoints=self,
            new_runtime=lambda: FakeRuntime(self, self._deaths.pop(0)),
            kill=lambda runtime: self.did.append(("kill",)),
            clear_away=self._does("clear away"),
            on_step=self._does("step"),
            note=self.notes.append,
            **kwargs,
        )

    def names(self) -> list[str]:
        return [name for name, *_ in self.did]

    def _does(self, name):
        async def method(*args):
            self.did.append((name, *args))

        return method

    async def _register(self, model_id, queue, *, trained, restored, groups_per_task):
        self.did.append(("register", restored))
        self._incarnations += 1
        return self._incarnations - 1

    async def set_status(self, model_id, status):
        self.did.append(("status", status.state))

    async def bind(self, binding):
        self.did.append(("bind", binding.incarnation))

    async def sweep(self, model_id):
        self.did.append(("sweep",))

    async def newest(self, model_id):
        return self._newest

    async def damage(self, saved):
        return self._damage

    async def commit(self, saved):
        self.did.append(("commit", saved.step))


class FakeRuntime:
    """Its training dies of ``death``, or ends at version 6 and its servers live on."""

    def __init__(self, world: World, death: Exception | None):
        self._world = world
        self._death = death
        self._reports = [PhaseReport(MODEL, "train", 5, 0.0)]
        self.launch = Remote(self._launch)
        self.publish = Remote(world._does("publish"))
        self.fit = Remote(self._fit)
        self.next_reports = Remote(self._next)
        self.check_serving = Remote(world._does("check"))

    async def _launch(self, incarnation, restored):
        self._world.did.append(("launch", incarnation, restored))
        return binding(MODEL, Path("/nowhere"), "", incarnation=incarnation)

    async def _fit(self):
        if self._death is not None:
            raise self._death
        self._reports.append(PhaseReport(MODEL, "ended", 6, 0.0))
        return TrainingOutcome(MODEL, 6, 6)

    async def _next(self, timeout_s):
        await asyncio.sleep(0)
        reports, self._reports = self._reports, []
        return reports


def died() -> Exception:
    return ray.exceptions.ActorDiedError()


@pytest.fixture
def job(plain_job):
    def build(restarts: int):
        supervision = plain_job.supervision.model_copy(update={"restarts": restarts})
        return plain_job.model_copy(update={"supervision": supervision})

    return build


def live(world: World, job) -> PolicyLife:
    """Open the policy and watch it until its training has ended."""

    async def run():
        life = world.life(job)
        await life.open(None)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(life.watch())
            await life.ended.wait()
            watch.cancel()
        return life

    return asyncio.run(asyncio.wait_for(run(), 20))


def failure(world: World, job) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        live(world, job)
    (error,) = caught.value.exceptions
    assert isinstance(error, JobFailedError)
    return str(error)


OPENED = ["register", "pause", "sweep", "launch", "bind", "publish", "pause"]


@pytest.mark.parametrize(
    ("target", "version", "reached"), [(6, 6, True), (6, 5, False), (None, 1, True), (None, 0, False)]
)
def test_a_training_has_reached_its_target_or_without_one_made_a_version(target, version, reached):
    """Invariant 8; there is no target with ``stop.by: tasks`` and ``time``."""
    assert TrainingOutcome(MODEL, version, target).reached_target is reached


def test_a_policy_counts_for_admission_once_its_gate_is_open(job):
    world = World(None)
    assert live(world, job(0)).outcome.version == 6
    assert world.names()[:7] == OPENED
    assert [args for name, *args in world.did if name == "pause"] == [[MODEL, True], [MODEL, False]]


def test_without_restarts_a_dead_policy_ends_the_job_and_nothing_is_started_again(job):
    world = World(died())
    assert failure(world, job(0)).startswith("solver_model: trainer: ActorDiedError")
    assert world.names() == OPENED


def test_a_dead_policy_starts_again_at_its_newest_checkpoint_as_a_new_incarnation(job):
    """It is killed before its gate is closed, so that nothing of it can open the gate again."""
    world = World(died(), None)
    assert live(world, job(1)).outcome.version == 6
    assert world.names()[7:18] == ["kill", "status", "pause", "clear away", *OPENED]
    assert ("status", ModelState.STARTING) in world.did, "its requests wait"
    assert [args for name, *args in world.did if name == "register"] == [[None], [(0, 4)]]
    assert [args for name, *args in world.did if name == "launch"] == [[0, None], [1, NEWEST]]
    assert ("bind", 1) in world.did
    assert any("starts again from version 4 (0 restarts left)" in note for note in world.notes)


def test_without_a_checkpoint_it_starts_again_from_its_initial_weights(job):
    world = World(died(), None, newest=None)
    live(world, job(1))
    assert [args for name, *args in world.did if name == "register"] == [[None], [None]]
    assert any("from its initial weights" in note for note in world.notes)


def test_the_job_ends_with_the_last_cause_when_the_restarts_are_used_up(job):
    world = World(died(), died(), ray.exceptions.RayTaskError("fit", "", ValueError("third")))
    assert failure(world, job(2)) == "solver_model: trainer: ValueError: third"
    assert world.names().count("launch") == 3


def test_a_damaged_checkpoint_is_not_started_from(job):
    world = World(died(), damage="is damaged: its files differ from the digest")
    assert "global_step_4 is damaged" in failure(world, job(1))
    assert world.names().count("launch") == 1


def test_a_defect_of_ours_is_no_reason_to_start_again(job):
    """Only what a part reports as its death is."""
    world = World(ValueError("no error of Ray's"), None)
    with pytest.raises(ExceptionGroup) as caught:
        live(world, job(5))
    assert isinstance(caught.value.exceptions[0], ValueError)
    assert world.names() == OPENED


def test_a_policy_that_dies_after_its_training_ended_takes_the_end_back(job):
    """Its restored weights may be older than the ones that had reached the target."""
    world = World(None, None)

    async def run():
        life = world.life(job(1))
        await life.open(None)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(life.watch())
            await life.ended.wait()
            life._restarts_left -= 1
            start = asyncio.ensure_future(life._start_again(JobFailedError("a replica died")))
            await asyncio.sleep(0)
            taken_back = not life.ended.is_set()
            await start
            watch.cancel()
        return taken_back

    assert asyncio.run(run())


def test_a_restart_clears_away_what_is_its_policys_alone(plain_job):
    """Names as verl 0.9.1 makes them; a model whose id begins like another one's is another model."""
    planner, solver = plain_job.models.values()
    twin = solver.model_copy(update={"namespace": f"{solver.namespace}2", "replica_rank_offset": 2000})
    names = {
        f"{planner.namespace}_trainer_poolverl_group_1:0": planner,
        f"{solver.namespace}_trainer_poolverl_group_1:0": solver,
        f"{twin.namespace}_trainer_poolverl_group_1:0": twin,
        f"rollout_pool_0_{planner.namespace}verl_group_1:0": planner,
        f"rollout_pool_1000_{solver.namespace}verl_group_1:0": solver,
        f"rollout_standalone_1001_{solver.namespace}WorkerDict_0:0": solver,
        "sglang_server_1000_0": solver,
        "sglang_server_2000_0": twin,
        "another_actor": None,
    }
    for name, owner in names.items():
        assert [policy for policy in (planner, solver, twin) if belongs_to(policy, name)] == ([owner] if owner else [])


def test_every_gateway_process_is_told_that_a_policy_starts_again():
    class Gateway:
        def __init__(self):
            self.told = []
            self.set_status = Remote(self._set_status)

        async def _set_status(self, model_id, status):
            self.told.append((model_id, status.state))

    gateways = [Gateway(), Gateway()]
    asyncio.run(GatewayGroup(gateways, "key").set_status(MODEL, ModelStatus(ModelState.STARTING, Version(0, 0))))
    assert [gateway.told for gateway in gateways] == [[(MODEL, ModelState.STARTING)]] * 2
