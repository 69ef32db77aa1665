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
"""When the whole team is evaluated, that it never ends or stalls the training, and what is told of it."""

import asyncio
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..ingest.handle import TargetDiedError
from ..multi_model_metrics import JobMetrics
from ..team_tracking import TeamTracking, metrics
from ..trajectory import Version
from ..validation_scheduler import Evaluation, ValidationScheduler
from ..workflows.evaluation import EvaluationReport
from .config_fixtures import problems_of, tiny_job
from .fakes.driven_job import eventually, validation_spec
from .fakes.workflow_records import PLANNER, SOLVER

REPORT = EvaluationReport(
    workflows=8,
    failed=1,
    score=0.5,
    rewards={"planner": 0.25, "solver": 0.5},
    first={PLANNER: Version(0, 3), SOLVER: Version(0, 7)},
    last={PLANNER: Version(0, 4), SOLVER: Version(0, 7)},
    seconds=1.5,
    last_error="RuntimeError: no plan",
)


class FakeDriver:
    """Evaluates until ``go`` is set; ``failures`` come first."""

    def __init__(self, *failures: Exception):
        self.failures = list(failures)
        self.running = self.most_running = self.evaluations = 0
        self.go = asyncio.Event()
        self.go.set()

    async def evaluate(self) -> EvaluationReport:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.go.wait()
            if self.failures:
                raise self.failures.pop(0)
            self.evaluations += 1
            return REPORT
        finally:
            self.running -= 1


class FakeIngestor:
    """Remembers whether versions are pinned; one is on its way while it is ``busy``."""

    def __init__(self, busy: bool):
        self.busy = busy
        self.pinned = False

    async def pin_versions(self, seconds: float, timeout_s: float) -> bool:
        assert seconds > 2 * timeout_s, "it outlasts the wait and the evaluation"
        self.pinned = True
        return not self.busy

    async def unpin_versions(self) -> None:
        self.pinned = False


class FakeGateway:
    """Serves the same version of both policies."""

    def __init__(self, version: str):
        self.version = version

    async def stats(self) -> dict[str, Any]:
        return {"models": {model_id: {"version": self.version} for model_id in (PLANNER, SOLVER)}}


class Team:
    """A scheduler between fakes; ``told`` is what it published, ``notes`` what it told people."""

    def __init__(self, *failures: Exception, served: str = "0.0", busy: bool = False, **spec: Any):
        self.driver, self.ingestor = FakeDriver(*failures), FakeIngestor(busy)
        self.told: list[Evaluation] = []
        self.notes: list[str] = []
        self.scheduler = ValidationScheduler(
            validation_spec(**({"before_training": False} | spec)),
            self.driver,
            self.ingestor,
            FakeGateway(served),
            [PLANNER, SOLVER],
            publish=self.told.append,
            note=self.notes.append,
        )

    async def settled(self) -> None:
        """All that was due has been done."""
        if self.scheduler._spec.enabled:
            await eventually(self._rests)

    def _rests(self) -> bool:
        noticed = not self.scheduler._changed.is_set()
        return noticed and not self.driver.running and len(self.told) == self.driver.evaluations

    @property
    def occasions(self) -> list[str]:
        return [evaluation.occasion for evaluation in self.told]


def train(team: Team, *versions: tuple[str, int], final: dict[str, int] | None = None) -> Team:
    """The policies make these versions, one after the other; then the training ends."""

    async def scenario():
        running = asyncio.create_task(team.scheduler.run())
        await asyncio.sleep(0)
        await team.settled()
        for model_id, number in versions:
            team.scheduler.on_version(model_id, number)
            await team.settled()
        team.scheduler.training_ended(final or dict(versions))
        await running

    asyncio.run(asyncio.wait_for(scenario(), 20))
    return team


def test_a_job_that_asks_for_no_evaluation_gets_none():
    assert train(Team(), (PLANNER, 50)).occasions == []


def test_the_initial_and_the_final_weights_are_evaluated_where_that_is_asked_for():
    team = train(Team(before_training=True, at_end=True), (PLANNER, 1), (SOLVER, 1))
    assert [(each.occasion, each.updates) for each in team.told] == [("before training", 0), ("at the end", 2)]


def test_an_evaluation_is_due_when_the_policy_that_is_ahead_has_made_so_many_versions():
    team = train(Team(every_updates=3), *((PLANNER, number) for number in range(1, 8)), (SOLVER, 1))
    assert [each.updates for each in team.told] == [3, 6]


def test_a_policy_goes_on_being_measured_when_the_faster_one_has_ended():
    fast, slow = [(PLANNER, number) for number in (1, 2)], [(SOLVER, number) for number in range(1, 7)]
    assert [each.updates for each in train(Team(every_updates=2), *fast, *slow).told] == [2, 4, 6, 8]


def test_what_falls_due_during_an_evaluation_is_one_evaluation_after_it():
    team = Team(every_updates=1)

    async def scenario():
        running = asyncio.create_task(team.scheduler.run())
        team.driver.go.clear()
        await asyncio.sleep(0)
        for number in range(1, 9):
            team.scheduler.on_version(PLANNER, number)
            await eventually(lambda: team.driver.running == 1)
        team.driver.go.set()
        await team.settled()
        team.scheduler.training_ended({})
        await running

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert [each.updates for each in team.told] == [1, 8] and team.driver.most_running == 1


def test_final_weights_that_were_measured_already_are_not_measured_again():
    team = Team(every_updates=2, at_end=True)
    assert train(team, (PLANNER, 1), (PLANNER, 2), final={PLANNER: 2, SOLVER: 0}).occasions == ["updates"]


def test_a_version_that_no_step_reported_is_measured_at_the_end():
    """The end of the data closes an open cycle as a version."""
    team = Team(every_updates=2, at_end=True)
    assert train(team, (PLANNER, 2), final={PLANNER: 3}).occasions == ["updates", "at the end"]


def test_a_job_that_goes_on_from_checkpoints_counts_from_their_versions():
    team = train(Team(every_updates=2, served="3.40"), (PLANNER, 41), (SOLVER, 41), (SOLVER, 42))
    assert [each.updates for each in team.told] == [83]


def test_a_restored_policy_whose_numbers_went_back_counts_from_there():
    team = train(Team(every_updates=2), (PLANNER, 5), (PLANNER, 1), (PLANNER, 2), (PLANNER, 3))
    assert [each.updates for each in team.told] == [5, 3]


@given(st.lists(st.tuples(st.sampled_from([PLANNER, SOLVER]), st.booleans()), max_size=25), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_once_it_rests_no_policy_is_as_far_from_measured_weights_as_configured(steps, every):
    team, versions, gaps = Team(every_updates=every), {PLANNER: 0, SOLVER: 0}, []

    async def scenario():
        running = asyncio.create_task(team.scheduler.run())
        await asyncio.sleep(0)
        for model_id, rest in steps:
            versions[model_id] += 1
            team.scheduler.on_version(model_id, versions[model_id])
            if rest:
                await team.settled()
                gaps.extend(versions[each] - team.scheduler._measured[each] for each in versions)
        team.scheduler.training_ended(versions)
        await running

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert all(0 <= gap < every for gap in gaps)
    assert len(team.told) <= sum(versions.values()) / every


@pytest.mark.parametrize("failure", [RuntimeError("no such column"), ValueError("bad"), OSError("disk full")])
def test_an_evaluation_that_fails_is_told_and_ends_nothing(failure):
    team = train(Team(failure, before_training=True, at_end=True, pin="hold_syncs"), (PLANNER, 1))
    assert team.occasions == ["at the end"]
    assert team.notes == [f"validation (before training) failed: {type(failure).__name__}: {failure}"]
    assert not team.ingestor.pinned


def test_when_the_driver_is_gone_there_are_no_more_evaluations_and_supervision_has_its_say():
    team = train(Team(TargetDiedError("killed"), before_training=True, at_end=True))
    assert team.told == [] and team.notes == []


@pytest.mark.parametrize("pin", ["none", "hold_syncs"])
def test_versions_are_pinned_while_an_evaluation_runs_where_that_is_asked_for(pin):
    team = Team(before_training=True, pin=pin)

    async def scenario():
        team.driver.go.clear()
        running = asyncio.create_task(team.scheduler.run())
        await eventually(lambda: team.driver.running)
        pinned = team.ingestor.pinned
        team.driver.go.set()
        await eventually(lambda: team.told)
        team.scheduler.training_ended({})
        await running
        return pinned, team.ingestor.pinned

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == (pin == "hold_syncs", False)


def test_a_version_that_never_arrives_does_not_keep_the_team_from_being_evaluated():
    team = train(Team(before_training=True, pin="hold_syncs", busy=True))
    assert team.occasions == ["before training"] and not team.ingestor.pinned


def test_people_see_one_line_and_the_run_directory_keeps_the_whole_report(tmp_path):
    console = io.StringIO()
    JobMetrics(tmp_path, [PLANNER, SOLVER], out=console).validation(Evaluation("updates", 10, REPORT))
    assert console.getvalue().split("s] ", 1)[1] == (
        "validation     score 0.500 (planner 0.250, solver 0.500)  8 workflows, 1 failed  "
        "planner_model versions 3-4, solver_model version 7  1.5 s, updates\n"
    )
    [line] = map(json.loads, (tmp_path / "validation.jsonl").read_text().splitlines())
    assert (line["score"], line["last"], line["last_error"]) == (
        0.5,
        {PLANNER: "0.4", SOLVER: "0.7"},
        "RuntimeError: no plan",
    )


def test_trackers_get_the_teams_score_rewards_by_agent_and_the_versions():
    assert metrics(Evaluation("updates", 10, REPORT)) == {
        "validation/score": 0.5,
        "validation/workflows": 8,
        "validation/failed": 1,
        "validation/seconds": 1.5,
        "validation/planner/reward": 0.25,
        "validation/solver/reward": 0.5,
        "validation/versions/planner_model/first": 3,
        "validation/versions/planner_model/last": 4,
        "validation/versions/solver_model/first": 7,
        "validation/versions/solver_model/last": 7,
    }


def test_verls_tracking_writes_them_into_a_file_of_the_run_and_another_when_the_run_goes_on(tmp_path, monkeypatch):
    for name in ("TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH"):
        monkeypatch.setenv(name, "")
    job = tiny_job(tmp_path, "metrics.backends=[file]")
    for updates in (10, 12):
        tracking = TeamTracking(job)
        tracking.log(Evaluation("updates", updates, REPORT))
        tracking.finish()
    for name, updates in (("validation", 10), ("validation.1", 12)):
        [line] = map(json.loads, (tmp_path / "run" / "metrics" / f"{name}.jsonl").read_text().splitlines())
        assert line["step"] == updates and line["data"]["validation/score"] == 0.5


@pytest.mark.slow
def test_an_evaluation_without_tasks_for_it_is_refused(tmp_path):
    found = problems_of(tmp_path, "validation.every_updates=5")
    assert "validation.every_updates asks for an evaluation" in found["data.val_files"]
    assert "validation.pin" in problems_of(tmp_path, "validation.pin=some")


@pytest.mark.slow
def test_how_often_tasks_are_played_is_the_teams_setting_and_not_a_policys(tmp_path):
    job = tiny_job(tmp_path, "validation.n=3")
    assert job.models[PLANNER].verl["actor_rollout_ref"]["rollout"]["val_kwargs"]["n"] == 3
    key = "multi_model.models.planner_model.actor_rollout_ref.rollout.val_kwargs.n"
    assert "set validation.n" in problems_of(tmp_path, f"{key}=2")[key]
