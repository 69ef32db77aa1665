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
"""From which checkpoints a run goes on, and every reason why it cannot: told at once, before Ray starts."""

import shutil

import pytest

from .. import main_multi_policy
from ..checkpoint_coordinator import CheckpointCoordinator, CheckpointSchedule
from ..configuration.errors import ConfigError
from ..resume import describe, plan_resume
from ..run_directory import write_config
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, SOLVER, finish_task, queue_spec, with_ingestor

SAVED = {PLANNER: (2, 4), SOLVER: (3,)}


@pytest.fixture(scope="module")
def config_folder(plain_job, tmp_path_factory):
    """What the job writes about itself, written once: that takes a while."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "tasks.parquet").write_text("tasks")
    data = plain_job.data.model_copy(update={"train_files": (folder / "tasks.parquet",)})
    run = plain_job.run.model_copy(update={"dir": folder / "run"})
    write_config(plain_job.model_copy(update={"run": run, "data": data}))
    return folder / "run" / "config"


@pytest.fixture
def jobs(plain_job, config_folder, tmp_path):
    """Builds the job with other settings, in the directory ``run`` below ``tmp_path``, which a run has claimed."""
    (tmp_path / "tasks.parquet").write_text("tasks")
    shutil.copytree(config_folder, tmp_path / "run" / "config")

    def build(run=None, data=None, **changes):
        data = plain_job.data.model_copy(update={"train_files": (tmp_path / "tasks.parquet",), **(data or {})})
        run = plain_job.run.model_copy(update={"dir": tmp_path / "run", "resume": True, **(run or {})})
        return plain_job.model_copy(update={"run": run, "data": data, **changes})

    return build


def write_run(job, saved=SAVED, *, prune=False) -> None:
    """What a killed job leaves beside its configuration: a ledger, checkpoints."""
    run_dir = job.run.dir

    async def scenario(ingestor):
        coordinator = CheckpointCoordinator(ingestor, run_dir, keep=None)
        await coordinator.start()
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
            for step in saved.get(model_id, ()):
                schedule = CheckpointSchedule(job.checkpoint, run_dir, model_id)
                folder = schedule.folder(0) / f"global_step_{step}"
                folder.mkdir(parents=True)
                (folder / "weights").write_text(f"{model_id} {step}")
                await coordinator.commit(schedule.describe(Version(0, step)))
        if prune:
            await finish_task(ingestor, 0)
            batch = await ingestor.take(PLANNER, 1, Version(0, 0), 1)
            await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
            await ingestor.prune()

    with_ingestor(run_dir, scenario)


def chosen(plan) -> dict[str, int | None]:
    return {model_id: saved and saved.step for model_id, saved in plan.items()}


def problems(job) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan_resume(job)
    return {problem.key: str(problem) for problem in caught.value.problems}


class TestWhichCheckpoint:
    def test_every_policy_goes_on_from_its_newest(self, jobs):
        write_run(jobs())
        assert chosen(plan_resume(jobs())) == {PLANNER: 4, SOLVER: 3}

    def test_one_without_a_checkpoint_starts_from_its_initial_weights(self, jobs):
        write_run(jobs(), {PLANNER: (2,)})
        plan = plan_resume(jobs())
        assert chosen(plan) == {PLANNER: 2, SOLVER: None}
        assert describe(plan) == [
            f"{PLANNER} goes on from version 2 (checkpoints/{PLANNER}/incarnation_0/global_step_2)",
            f"{SOLVER} goes on from its initial weights",
        ]

    def test_an_older_version_can_be_named(self, jobs):
        write_run(jobs())
        assert chosen(plan_resume(jobs(run={"resume_at": {PLANNER: 2, SOLVER: 0}}))) == {PLANNER: 2, SOLVER: None}

    def test_a_run_that_ended_before_its_ledger_began_starts_anew(self, jobs):
        assert chosen(plan_resume(jobs())) == {PLANNER: None, SOLVER: None}

    def test_a_run_can_be_moved_and_so_can_its_data(self, jobs, tmp_path):
        write_run(jobs())
        shutil.move(tmp_path / "run", tmp_path / "elsewhere")
        (tmp_path / "tasks.parquet").rename(tmp_path / "moved.parquet")
        moved = jobs(run={"dir": tmp_path / "elsewhere"}, data={"train_files": (tmp_path / "moved.parquet",)})
        assert chosen(plan_resume(moved)) == {PLANNER: 4, SOLVER: 3}


class TestRefused:
    def test_a_version_that_is_no_checkpoint(self, jobs):
        write_run(jobs())
        found = problems(jobs(run={"resume_at": {PLANNER: 3, "nobody": 1}}))
        assert "names no trained model" in found["run.resume_at.nobody"]
        assert "no checkpoint of the ledger" in found[f"run.resume_at.{PLANNER}"]
        assert "allowed: 2, 4" in found[f"run.resume_at.{PLANNER}"]

    def test_initial_weights_that_the_ledger_is_pruned_beyond(self, jobs):
        write_run(jobs(), prune=True)
        found = problems(jobs(run={"resume_at": {PLANNER: 0}}))
        assert "pruned behind its checkpoints" in found[f"run.resume_at.{PLANNER}"]

    def test_missing_and_damaged_files_of_all_policies_at_once(self, jobs, tmp_path):
        write_run(jobs())
        (newest,) = (tmp_path / "run" / "checkpoints" / PLANNER).rglob("global_step_4/weights")
        newest.write_text("another")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / SOLVER)
        found = problems(jobs(run={"seed": 7}))
        assert "data.seed" in found
        assert "version 4 is damaged" in found[f"run.resume_at.{PLANNER}"]
        assert "version 3 cannot be read" in found[f"run.resume_at.{SOLVER}"]
        assert chosen(plan_resume(jobs(run={"resume_at": {PLANNER: 2, SOLVER: 0}}))), "the way out that they name"

    def test_checkpoints_of_another_ledger(self, jobs, tmp_path):
        write_run(jobs())
        write_run(jobs(run={"dir": tmp_path / "other"}))
        shutil.copy(tmp_path / "other" / "ledger.sqlite", tmp_path / "run" / "ledger.sqlite")
        assert "belong to another ledger" in problems(jobs())["run.dir"]

    def test_checkpoints_in_another_runs_folder(self, jobs, tmp_path):
        write_run(jobs())

        async def scenario(ingestor):
            outside = tmp_path / "other" / "global_step_9"
            outside.mkdir(parents=True)
            await ingestor.add_checkpoint(PLANNER, 0, 9, "digest", str(outside))

        with_ingestor(tmp_path / "run", scenario)
        assert "another run's folder" in problems(jobs())["run.dir"]

    def test_checkpoints_without_a_manifest_and_a_ledger_that_is_gone(self, jobs, tmp_path):
        write_run(jobs())
        (tmp_path / "run" / "checkpoints" / "manifest.json").rename(tmp_path / "manifest.json")
        assert "have no manifest" in problems(jobs())["run.dir"]
        (tmp_path / "manifest.json").rename(tmp_path / "run" / "checkpoints" / "manifest.json")
        (tmp_path / "run" / "ledger.sqlite").unlink()
        assert "there is no ledger" in problems(jobs())["run.dir"]

    def test_a_file_that_is_no_ledger(self, jobs, tmp_path):
        write_run(jobs())
        for file in (tmp_path / "run").glob("ledger.sqlite*"):
            file.write_text("not a ledger, and longer than the head of one would be")
        assert "is not a ledger" in problems(jobs())["run.dir"]

    def test_settings_that_checkpoints_waiting_rows_and_task_numbers_depend_on(self, jobs, tmp_path):
        job = jobs()
        write_run(job)
        (tmp_path / "tasks.parquet").write_text("other tasks")
        solver = job.models[SOLVER]
        verl = {**solver.verl, "actor_rollout_ref": {**solver.verl["actor_rollout_ref"]}}
        rollout = {**verl["actor_rollout_ref"]["rollout"], "temperature": 0.5}
        verl["actor_rollout_ref"]["rollout"] = rollout
        changed = {"verl": verl, "trainer_gpus": 2, "queue": solver.queue.model_copy(update={"group_by": "task"})}
        found = problems(
            jobs(
                run={"name": "another", "seed": 7},
                data={"train_max_samples": 3},
                agent_model_mapping={"planner": SOLVER, "solver": PLANNER},
                models={**job.models, SOLVER: solver.model_copy(update=changed)},
            )
        )
        at = f"multi_model.models.{SOLVER}"
        assert set(found) == {
            "run.name",
            "data.seed",
            "data.train_files",
            "data.train_max_samples",
            "agent_model_mapping",
            f"{at}.trainer.n_gpus",
            f"{at}.async_training.group_by",
            f"{at}.actor_rollout_ref.rollout.temperature",
        }
        assert "is 1.0 in the run that is to go on" in found[f"{at}.actor_rollout_ref.rollout.temperature"]

    def test_micro_batches_that_rows_of_the_run_may_not_fit(self, jobs):
        """Shorter rows in smaller micro batches: those that wait are as long as before."""
        job = jobs()
        write_run(job)
        policy = job.models[PLANNER]
        longest = policy.verl["data"]["max_prompt_length"] + policy.verl["data"]["max_response_length"]

        def with_budget(tokens: int):
            actor = {**policy.verl["actor_rollout_ref"]["actor"], "ppo_max_token_len_per_gpu": tokens}
            data = {**policy.verl["data"], "max_response_length": 1}
            verl = {**policy.verl, "data": data, "actor_rollout_ref": {**policy.verl["actor_rollout_ref"]}}
            verl["actor_rollout_ref"]["actor"] = actor
            return jobs(models={**job.models, PLANNER: policy.model_copy(update={"verl": verl})})

        key = f"multi_model.models.{PLANNER}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        assert set(problems(with_budget(longest - 1))) == {key}
        assert plan_resume(with_budget(longest))

    def test_another_set_of_models(self, jobs):
        job = jobs()
        write_run(job)
        found = problems(jobs(models={PLANNER: job.models[PLANNER]}))
        assert set(found) == {"multi_model.models"}


def test_what_neither_depends_on_may_change(jobs):
    job = jobs()
    write_run(job)
    policy = job.models[PLANNER]
    later = {"target_updates": 99, "queue": policy.queue.model_copy(update={"max_staleness": 1})}
    models = {**job.models, PLANNER: policy.model_copy(update=later)}
    stop = job.stop.model_copy(update={"updates": 99})
    assert chosen(plan_resume(jobs(models=models, stop=stop))) == {PLANNER: 4, SOLVER: 3}


def test_explain_says_from_where_a_run_goes_on_or_why_not(jobs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main_multi_policy, "compose_job", lambda *_: jobs(run={"resume": "auto"}))
    write_run(jobs())
    assert main_multi_policy.main(["--explain"]) == 0
    assert f"{SOLVER} goes on from version 3" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main_multi_policy.main(["--explain"]) == main_multi_policy.EXIT_CONFIG
    assert "have no manifest" in capsys.readouterr().err
