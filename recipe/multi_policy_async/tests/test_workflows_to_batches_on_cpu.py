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
"""Driver, real agents over HTTP, real gateway, ingestor, batch source: only the engines are fake."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from ..gateway.client import GatewayControlClient
from ..gateway.spec import GatewaySpec
from ..gateway_binding_registry import ModelState, ModelStatus
from ..ingest.batch_source import End, IngestBatchSource, TakenBatch
from ..multi_model_gateway_router import MultiModelGatewayRouter
from ..trajectory import Version
from ..trajectory_ingestor import TrajectoryIngestor
from ..workflow_driver import WorkflowDriver
from ..workflows.base import Outcome, Task
from .fakes.driven_job import eventually, validation_spec, workflow_spec
from .fakes.fake_engine import FakeEngine, log_prob_of
from .fakes.gateway_world import DEFAULTS, binding
from .fakes.workflow_records import PLANNER, SOLVER, ingest_spec, queue_spec, workflow_stats

MAPPING = {"planner": PLANNER, "solver": SOLVER}
MEMBERS = 2


class Sums:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Task:
        return Task(index, {"prompt": [{"role": "user", "content": f"{index}+1"}]})


class PlanThenSolve:
    """Each agent is called once, the solver a second time for odd tasks."""

    max_retries = 2

    async def run(self, task, agents):
        agents["solver"].client.max_retries = self.max_retries
        plan = await agents["planner"].chat([{"role": "user", "content": task.question}])
        answer = await agents["solver"].chat([{"role": "user", "content": plan}])
        if task.index % 2:
            answer = await agents["solver"].chat([{"role": "user", "content": f"check {answer}"}])
        return {"planner": 0.5, "solver": float(len(answer) > 0)}


@asynccontextmanager
async def job(tmp_path, folder, engines, workflow, **changes):
    ingestor = TrajectoryIngestor(tmp_path / "ledger.sqlite", ingest_spec())
    spec = workflow_spec(n=MEMBERS, **changes)
    router = MultiModelGatewayRouter(
        GatewaySpec.model_validate(DEFAULTS),
        MAPPING,
        tuple(engines),
        ingestor.ingest,
        team_share=spec.team_share,
    )
    url = await router.start()
    control = GatewayControlClient(url, router.control_key)
    driver = WorkflowDriver(
        spec,
        workflow,
        Sums(),
        control,
        ingestor,
        run_dir=tmp_path,
        shuffle=False,
        seed=0,
        epochs=1,
        policies=len(engines),
        poll_s=0.05,
        eval_tasks=Sums(),
        validation=validation_spec(),
    )
    try:
        for model_id, engine in engines.items():
            await ingestor.register_policy(model_id, queue_spec(max_lead_groups=100), True)
            await router.bind(binding(model_id, folder, await engine.start()))
            await router.set_status(model_id, ModelStatus(ModelState.OPEN, Version(0, 1)))
        yield ingestor, driver, router
    finally:
        await driver.stop()
        await control.close()
        await router.stop()
        for engine in engines.values():
            await engine.stop()
        await ingestor.close()


def _engines(texts) -> dict[str, FakeEngine]:
    return {PLANNER: FakeEngine(texts.echoes()), SOLVER: FakeEngine(texts.echoes())}


def test_what_the_engines_sampled_arrives_in_the_trainers_batches_token_by_token(tmp_path, folder, texts):
    """Invariants 1 and 2, over the whole path."""

    async def run():
        engines = _engines(texts)
        async with job(tmp_path, folder, engines, PlanThenSolve(), dump_every=1) as (ingestor, driver, _):
            await driver.run()
            batches = {}
            for model_id in engines:
                source = IngestBatchSource(ingestor, model_id, groups=4, poll_s=0.05)
                batches[model_id] = await source.next_batch(Version(0, 1))
                source.mark_consumed(Version(0, 2))
                assert isinstance(await source.next_batch(Version(0, 2)), End)
            return batches, await ingestor.stats(), await driver.stats()

    batches, stats, driver = asyncio.run(run())
    assert driver["finished"] == 4 * MEMBERS and driver["score_mean"] == 0.75
    echo = texts.echoes()
    for model_id, batch in batches.items():
        assert isinstance(batch, TakenBatch) and len(batch.groups) == 4
        for group in batch.groups:
            task = int(group.group_id.split("/")[0].split("-t")[1])
            assert len(group.trajectories) == MEMBERS * (2 if model_id == SOLVER and task % 2 else 1)
            for row in group.trajectories:
                assert row.response_ids.tolist() == echo(row.prompt_ids.tolist())
                assert row.log_probs.tolist() == [log_prob_of(i) for i in row.response_ids]
                assert set(row.versions.tolist()) == {1} and row.response_mask.all()
                assert row.reward == (0.5 if model_id == PLANNER else 1.0)
        assert stats[model_id]["unaccounted"] == 0 and stats[model_id]["trained"] == stats[model_id]["accepted"]
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 4 * MEMBERS
    assert [call["agent"] for call in episodes[0]["calls"]][:2] == ["planner", "solver"]


def test_a_workflow_that_cannot_use_a_policy_is_tried_again_and_leaves_one_record(tmp_path, folder, texts):
    """Invariant 4, with a policy whose server cuts some connections."""

    async def run():
        engines = _engines(texts)
        engines[SOLVER].faults = [0] * 60  # more than the gateway tries for one call
        workflow = PlanThenSolve()
        workflow.max_retries = 0
        async with job(tmp_path, folder, engines, workflow, max_attempts=10) as (ingestor, driver, _):
            await driver.run()
            return await ingestor.stats(), workflow_stats(ingestor), await driver.stats()

    stats, workflows, driver = asyncio.run(run())
    assert workflows == {"open_tasks": 0, "in_flight": 0, "endings": {"ok": 4 * MEMBERS}}
    assert driver["retried"] > 0, "the fault happened"
    assert stats[PLANNER]["accepted"] == 4 * MEMBERS and stats[SOLVER]["accepted"] == 6 * MEMBERS


class PostsItsRewards(PlanThenSolve):
    """What a black-box agent does, by its base URL alone."""

    async def run(self, task, agents):
        rewards = await super().run(task, agents)
        async with httpx.AsyncClient(verify=False) as http:
            url = f"{agents['solver'].base_url}/rewards"
            (await http.post(url, json={"rewards": rewards})).raise_for_status()
        return Outcome(None)


@pytest.mark.parametrize("workflow", [PlanThenSolve, PostsItsRewards])
def test_returned_and_posted_rewards_are_trained_with_the_same_share_of_the_teams_score(
    tmp_path, folder, texts, workflow
):
    """Own rewards 0.5 and 1, the score is 0.75."""

    async def run():
        async with job(tmp_path, folder, _engines(texts), workflow(), team_share={"planner": 0.5}, dump_every=1) as (
            ingestor,
            driver,
            _,
        ):
            await driver.run()
            batches = [await ingestor.take(model_id, 4, Version(0, 1), 1) for model_id in (PLANNER, SOLVER)]
            trained = [{row.reward for group in batch.groups for row in group.trajectories} for batch in batches]
            return trained, (await driver.stats())["score_mean"], await driver.evaluate()

    trained, score, evaluation = asyncio.run(run())
    assert trained == [{0.625}, {1.0}] and score == 0.75
    assert evaluation.score == 0.75 and evaluation.rewards == {"planner": 0.625, "solver": 1.0}


class AsksAStranger:
    async def run(self, task, agents):
        await agents["planner"].chat([{"role": "user", "content": task.question}])
        return await agents["stranger"].chat([])


def test_a_mistake_in_a_workflow_is_told_by_the_driver_and_costs_no_retries(tmp_path, folder, texts):
    async def run():
        async with job(tmp_path, folder, _engines(texts), AsksAStranger()) as (ingestor, driver, _):
            await driver.run()
            return await ingestor.stats(), await driver.stats()

    stats, driver = asyncio.run(run())
    assert driver["failed"] == 4 * MEMBERS and driver["retried"] == 0
    assert "unknown agent 'stranger'; agent_model_mapping names planner, solver" in driver["last_error"]
    assert stats[PLANNER]["dropped"] == {"failed_workflow": 4 * MEMBERS}


def test_an_evaluation_tells_score_rewards_and_versions_and_leaves_no_row(tmp_path, folder, texts):
    async def run():
        async with job(tmp_path, folder, _engines(texts), PlanThenSolve()) as (ingestor, driver, _):
            return await driver.evaluate(), await ingestor.stats()

    report, stats = asyncio.run(run())
    assert (report.workflows, report.failed, report.score) == (4, 0, 0.75)
    assert report.rewards == {"planner": 0.5, "solver": 1.0}
    assert report.first == report.last == {PLANNER: Version(0, 1), SOLVER: Version(0, 1)}
    assert all(policy["accepted"] == 0 for policy in stats.values())


class OddTasksNeedTheSolver:
    async def run(self, task, agents):
        plan = await agents["planner"].chat([{"role": "user", "content": task.question}])
        if task.index % 2:
            await agents["solver"].chat([{"role": "user", "content": plan}])
        return 1.0


def test_a_model_that_syncs_for_long_does_not_stop_workflows_that_do_not_need_it(tmp_path, folder, texts):
    """Invariant 7: the four workflows of odd tasks would hold both slots."""

    async def run():
        slots = {"max_concurrent": 2, "max_blocked_per_policy": 4, "blocked_after_s": 0.02}
        async with job(tmp_path, folder, _engines(texts), OddTasksNeedTheSolver(), **slots) as (
            ingestor,
            driver,
            router,
        ):
            await router.set_status(SOLVER, ModelStatus(ModelState.SYNCING, Version(0, 1)))
            running = asyncio.create_task(driver.run())
            await eventually(lambda: workflow_stats(ingestor)["endings"] == {"ok": 2 * MEMBERS})
            await router.set_status(SOLVER, ModelStatus(ModelState.OPEN, Version(0, 2)))
            await running
            return workflow_stats(ingestor)["endings"], await ingestor.stats()

    endings, stats = asyncio.run(asyncio.wait_for(run(), 60))
    assert endings == {"ok": 4 * MEMBERS}
    assert (stats[PLANNER]["accepted"], stats[SOLVER]["accepted"]) == (4 * MEMBERS, 2 * MEMBERS)
