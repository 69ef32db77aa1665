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
"""A job that cannot run: every problem is named at once, by its key."""

import pytest

from ...configuration.compose import compose_job
from ...configuration.errors import ConfigError
from ..config_fixtures import PLANNER, SOLVER, problems_of, tiny_job

pytestmark = pytest.mark.slow  # whole jobs are composed

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

WRONG = [
    [  # override, key that the message names; all of a batch are composed together
        ("multi_model.enable=false", "multi_model.enable"),
        ("gateway.mode=single", "gateway.mode"),
        ("agent_model_mapping.planner=null", "agent_model_mapping.planner"),
        (f"{PLANNER}.model_path=null", f"{PLANNER}.model_path"),
        (f"{SOLVER}.model_path=org/name", f"{SOLVER}.model_path"),
        (f"{PLANNER}.trainer.n_gpus=0", f"{PLANNER}.trainer.n_gpus"),
        (f"{PLANNER}.{_ROLLOUT}.temperature=0", f"{PLANNER}.{_ROLLOUT}.temperature"),
        (f"{PLANNER}.{_ROLLOUT}.top_p=1.5", f"{PLANNER}.{_ROLLOUT}.top_p"),
        (f"{PLANNER}.{_ROLLOUT}.top_k=0", f"{PLANNER}.{_ROLLOUT}.top_k"),
        (f"{PLANNER}.{_ACTOR}.strategy=fsdp", f"{PLANNER}.{_ACTOR}.strategy"),
        (f"{PLANNER}.{_ACTOR}.optim.lr=fast", f"{PLANNER}.{_ACTOR}.optim.lr"),
        (f"{PLANNER}.async_training.use_trainer_do_validate=true", f"{PLANNER}.async_training.use_trainer_do_validate"),
        (f"{PLANNER}.reward_model.enable=true", f"{PLANNER}.reward_model"),
        (f"{SOLVER}.{_ROLLOUT}.tensor_model_parallel_size=2", f"{SOLVER}.rollout.n_gpus"),
        (f"{SOLVER}.algorithm.adv_estimator=gae", f"{SOLVER}.algorithm.adv_estimator"),
        (f"{SOLVER}.{_ACTOR}.checkpoint=none", f"{SOLVER}.{_ACTOR}.checkpoint"),
        (f"{SOLVER}.{_ACTOR}.ppo_mini_batch_size=0", f"{SOLVER}.{_ACTOR}.ppo_mini_batch_size"),
        ("data.train_files=/nowhere.parquet", "data.train_files"),
        ("run.name=two words", "run.name"),
    ],
    [
        ("workflow.n=1", "workflow.n"),
        ("workflow.team_share={plannr: 0.5}", "workflow.team_share.plannr"),
        ("agent_model_mapping.solver=planner_model", SOLVER),
        (f"{PLANNER}.train=maybe", f"{PLANNER}.train"),
        (f"{PLANNER}.data.max_prompt_length=0", f"{PLANNER}.data.max_prompt_length"),
        (f"{SOLVER}.{_ACTOR}.ppo_max_token_len_per_gpu=10", f"{SOLVER}.{_ACTOR}.ppo_max_token_len_per_gpu"),
        (f"{SOLVER}.{_ROLLOUT}.max_model_len=10", f"{SOLVER}.{_ROLLOUT}.max_model_len"),
        (f"{SOLVER}.async_training.on_stale=maybe", f"{SOLVER}.async_training.on_stale"),
        ("stop.updates=0", "stop.updates"),
        ("ingest.admission=some", "ingest.admission"),
    ],
]


@pytest.fixture(scope="module")
def all_wrong(tmp_path_factory):
    """Keys that the messages name, of every batch."""
    named = set()
    for batch in WRONG:
        named |= set(problems_of(tmp_path_factory.mktemp("wrong"), *(override for override, _ in batch)))
    return named


class TestProblems:
    def test_all_problems_are_listed_at_once(self, tmp_path):
        found = problems_of(
            tmp_path,
            "agent_model_mapping.planner=planer_model",
            f"{SOLVER}.model_path=/nowhere/at/all",
            "policy_defaults.actor_rollout_ref.rolout.n=1",
            "gatewy.mode=multi_model_router",
            "stop.by=time",
        )
        assert set(found) >= {
            "agent_model_mapping.planner",
            f"{SOLVER}.model_path",
            "policy_defaults.actor_rollout_ref.rolout",
            "gatewy",
            "stop.seconds",
        }

    def test_a_mistyped_key_is_answered_with_the_closest_one(self, tmp_path):
        found = problems_of(tmp_path, f"{PLANNER}.actor_rollout_ref.actor.optm.lr=1", "run.sead=1", "stopp.by=time")
        assert "'optim'" in found[f"{PLANNER}.actor_rollout_ref.actor.optm"]
        assert "'seed'" in found["run.sead"]
        assert "'stop'" in found["stopp"]

    def test_a_key_at_the_wrong_level_is_answered_with_its_place(self, tmp_path):
        key = f"{PLANNER}.actor_rollout_ref.actor.lr"
        assert "actor_rollout_ref.actor.optim.lr" in problems_of(tmp_path, f"{key}=1")[key]

    def test_a_problem_of_policy_defaults_is_told_once_and_not_per_model(self, tmp_path):
        with pytest.raises(ConfigError) as caught:
            tiny_job(tmp_path, "policy_defaults.trainr.n_gpus=1")
        assert len(caught.value.problems) == 1

    @pytest.mark.parametrize("key", [key for batch in WRONG for _, key in batch])
    def test_a_job_that_cannot_run_names_the_key(self, all_wrong, key):
        assert key in all_wrong

    def test_a_job_without_models_agents_and_tasks_says_all_three(self):
        with pytest.raises(ConfigError) as caught:
            compose_job()
        keys = [problem.key for problem in caught.value.problems]
        assert keys == ["multi_model.models", "agent_model_mapping", "data.train_files"]

    def test_values_of_a_wrong_type_are_problems_like_others(self, tmp_path):
        wrong = {
            "agent_model_mapping.planner": "[planner_model]",
            "agent_model_mapping.solver": "{a: 1}",
            "data.train_files": 5,
            "data.val_files": "true",
            "multi_model.allow_unused": "sometimes",
        }
        assert set(problems_of(tmp_path, *(f"{key}={value}" for key, value in wrong.items()))) >= set(wrong)
        with pytest.raises(ConfigError, match="multi_model = 3: must be a section"):
            compose_job(overrides=["multi_model=3"])

    def test_what_checks_compute_with_is_a_problem_where_it_is_null_or_of_another_kind(self, tmp_path):
        """All at once, also with those of the checks that compute with it."""
        wrong = {
            "model_path": 5,
            "data.max_prompt_length": "null",
            "async_training.require_batches": "null",
            "async_training.staleness_threshold": "null",
            f"{_ROLLOUT}.temperature": "null",
            f"{_ROLLOUT}.top_p": "null",
            f"{_ROLLOUT}.response_length": "long",  # a reference in verl, so of no kind
            f"{_ROLLOUT}.max_model_len": "long",
            f"{_ROLLOUT}.data_parallel_size": -1,
            f"{_ACTOR}.ppo_mini_batch_size": 1.5,
            f"{_ACTOR}.policy_loss": "null",  # a section
        }
        found = problems_of(tmp_path, *(f"{PLANNER}.{key}={value}" for key, value in wrong.items()))
        assert set(found) == {f"{PLANNER}.{key}" for key in wrong}
        assert tiny_job(tmp_path, f"{PLANNER}.{_ROLLOUT}.max_model_len=null"), "as if it were left out"

    def test_a_decaying_schedule_needs_a_known_horizon(self, tmp_path):
        key = f"{PLANNER}.actor_rollout_ref.actor.optim.lr_scheduler_type"
        assert tiny_job(tmp_path, f"{key}=cosine")
        assert key in problems_of(tmp_path, f"{key}=cosine", "stop.by=tasks", "stop.tasks=100")

    def test_an_unused_model_is_accepted_when_the_user_says_so(self, tmp_path):
        job = tiny_job(tmp_path, "agent_model_mapping.solver=planner_model", "multi_model.allow_unused=true")
        assert set(job.models) == {"planner_model", "solver_model"}

    def test_a_job_without_a_model_to_train_is_refused(self, tmp_path):
        found = problems_of(tmp_path, f"{PLANNER}.train=false", f"{SOLVER}.train=false")
        assert "nothing to train" in found["multi_model.models"]

    def test_a_rollout_server_without_sglangs_interface_needs_verls_client(self, tmp_path):
        key = f"{PLANNER}.actor_rollout_ref.rollout.name"
        found = problems_of(tmp_path, "device=gpu", f"{key}=vllm")
        assert list(found) == [key] and "gateway.upstream=verl_client" in found[key]
        assert tiny_job(tmp_path, "device=gpu", f"{key}=vllm", "gateway.upstream=verl_client")
        assert tiny_job(tmp_path, "device=gpu", f"{key}=sglang", f"{SOLVER}.actor_rollout_ref.rollout.name=hf")

    def test_a_hub_id_is_accepted_on_a_gpu_machine(self, tmp_path):
        job = tiny_job(tmp_path, "device=gpu", f"{PLANNER}.model_path=Qwen/Qwen3-0.6B")
        assert job.models["planner_model"].model_path == "Qwen/Qwen3-0.6B"

    def test_the_gateway_aborts_idle_workflows_only_after_the_drivers_own_deadline(self, tmp_path):
        key = "gateway.workflow_idle_s"
        found = problems_of(tmp_path, "workflow.timeout_s=2000")
        assert list(found) == [key] and "gateway.workflow_idle_s=4060" in found[key]
        assert tiny_job(tmp_path, "workflow.timeout_s=2000", f"{key}=4060")
        assert tiny_job(tmp_path, "workflow.timeout_s=2000", f"{key}=null")

    @pytest.mark.parametrize("overrides", [["device=tpu"], ["run.seed=="], ["a.b.c"]])
    def test_hydras_own_refusals_are_one_message_too(self, tmp_path, overrides):
        with pytest.raises(ConfigError):
            tiny_job(tmp_path, *overrides)

    def test_a_reference_to_nothing_names_the_key(self, tmp_path):
        key = f"{PLANNER}.actor_rollout_ref.rollout.max_num_seqs"
        assert key in problems_of(tmp_path, f"{key}=${{nothing.there}}")
