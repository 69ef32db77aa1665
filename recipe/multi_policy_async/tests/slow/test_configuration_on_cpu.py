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
"""Composing a job: layers, derived settings, names that never meet."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ...configuration.compose import CONFIG_DIR, compose_job, compose_raw, normalise_models
from ...configuration.errors import ConfigError
from ...configuration.policy import RANKS_PER_MODEL
from ...configuration.schema import JobSpec
from ...configuration.verl_tree import LEGACY_KEYS, verl_defaults
from ..config_fixtures import PLANNER, SOLVER, model_folder, problems_of, tiny_job, tiny_overrides

pytestmark = pytest.mark.slow  # whole jobs are composed

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LR = f"{_ACTOR}.optim.lr"


@pytest.fixture(scope="module")
def changed_job(tmp_path_factory) -> JobSpec:
    """One job with the settings that the tests below look at, since composing one takes a while."""
    return tiny_job(
        tmp_path_factory.mktemp("changed"),
        "run.gpus_per_node=4",
        "stop.updates=7",
        "workflow.n=6",
        "queue.max_staleness=9",
        "policy_defaults.data.max_prompt_length=100",
        "policy_defaults.data.max_response_length=28",
        f"policy_defaults.{_LR}=0.25",
        f"policy_defaults.{_ROLLOUT}.checkpoint_engine.backend=nccl",
        f"{PLANNER}.trainer.n_gpus=8",
        f"{PLANNER}.rollout.n_gpus=2",
        f"{PLANNER}.{_ACTOR}.ppo_mini_batch_size=4",
        f"{PLANNER}.{_ROLLOUT}.max_num_seqs=${{data.max_prompt_length}}",
        f"{PLANNER}.actor_rollout_ref.model.override_config.rope_scaling=2",
        f"{PLANNER}.async_training.trigger_parameter_sync_step=2",
        f"{PLANNER}.async_training.require_batches=3",
        f"{PLANNER}.async_training.staleness_threshold=0.5",
        f"{PLANNER}.async_training.max_staleness=2",
        f"{SOLVER}.{_LR}=0.5",
        f"{SOLVER}.{_ROLLOUT}.max_num_seqs=${{workflow.n}}",
        f"{SOLVER}.async_training.trigger_parameter_sync_step=3",
    )


def test_composing_imports_neither_torch_nor_verl_nor_ray(tmp_path):
    script = (
        "import sys; from recipe.multi_policy_async.configuration.compose import compose_job\n"
        "compose_job('planner_solver_tiny', sys.argv[1:])\n"
        "sys.exit(', '.join({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, *tiny_overrides(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verl_itself_accepts_the_composed_tree(plain_job):
    """verl's dataclasses know every key, and its own checks pass."""
    config_tools = pytest.importorskip("verl.utils.config")
    for policy in plain_job.models.values():
        config = policy.verl_config()
        rollout = config_tools.omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        assert rollout.custom["namespace"] == policy.namespace
        config_tools.omega_conf_to_dataclass(config.algorithm)
        config_tools.validate_config(config, use_reference_policy=False, use_critic=False)


class TestLayers:
    def test_a_models_section_wins_over_policy_defaults_and_those_over_verl(self, changed_job):
        values = {m: p.verl["actor_rollout_ref"]["actor"]["optim"]["lr"] for m, p in changed_job.models.items()}
        assert values == {"planner_model": 0.25, "solver_model": 0.5}
        assert verl_defaults()["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6

    def test_the_tree_is_verls_fully_async_one_and_not_its_base_alone(self):
        tree = verl_defaults()
        assert tree["actor_rollout_ref"]["actor"]["use_rollout_log_probs"] is True
        assert "staleness_threshold" in tree["async_training"]

    def test_legacy_reward_keys_are_gone_as_after_verls_own_migration(self):
        assert not set(LEGACY_KEYS) & set(verl_defaults())

    def test_the_device_overlay_decides_platform_and_weight_transfer(self, plain_job):
        assert plain_job.device == "cpu"
        verl = plain_job.models["planner_model"].verl
        assert verl["trainer"]["device"] == "cpu"
        assert verl["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["backend"] == "gloo"

    def test_a_reference_in_a_section_sees_verls_tree_first_and_then_the_jobs(self, changed_job):
        seqs = {m: p.verl["actor_rollout_ref"]["rollout"]["max_num_seqs"] for m, p in changed_job.models.items()}
        assert seqs == {"planner_model": 100, "solver_model": 6}

    def test_origin_tells_the_command_line_from_files_and_omits_verls_own_values(self, changed_job):
        origin = changed_job.models["solver_model"].origin
        assert origin[_LR] == "models.solver_model (command line)"
        assert origin["trainer.device"] == "device/cpu"
        assert origin["trainer.experiment_name"] == "derived"
        assert "actor_rollout_ref.actor.clip_ratio" not in origin

    def test_below_nodes_that_verl_leaves_empty_any_key_is_accepted(self, changed_job):
        model = changed_job.models["planner_model"].verl["actor_rollout_ref"]["model"]
        assert model["override_config"]["rope_scaling"] == 2

    def test_a_plus_adds_a_key_that_verls_yaml_does_not_list(self, tmp_path):
        (tmp_path / "mine.yaml").write_text(
            yaml.safe_dump(
                {
                    "defaults": ["planner_solver_tiny", "_self_"],
                    "policy_defaults": {"actor_rollout_ref": {"rollout": {"+repetition_penalty": 1.1}}},
                }
            )
        )
        job = compose_job("mine", tiny_overrides(tmp_path), config_dir=tmp_path)
        assert job.models["solver_model"].verl["actor_rollout_ref"]["rollout"]["repetition_penalty"] == 1.1

    def test_verl_config_is_a_fresh_open_copy(self, plain_job):
        policy = plain_job.models["planner_model"]
        config = policy.verl_config()
        config.actor_rollout_ref.actor.optim.lr = 9.0
        config.a_key_that_verl_adds = 1
        assert policy.verl_config().actor_rollout_ref.actor.optim.lr != 9.0


class TestNamespaces:
    """Collisions C1, C2, C7-C9, C11-C13 of two models in one job."""

    def test_names_folders_ranks_and_ports_of_two_models_never_meet(self, plain_job):
        first, second = plain_job.models.values()
        for name in ("namespace", "replica_rank_offset", "master_port_range"):
            assert getattr(first, name) != getattr(second, name)
        assert first.master_port_range[1] <= second.master_port_range[0]
        assert second.replica_rank_offset - first.replica_rank_offset >= RANKS_PER_MODEL
        for key in ("experiment_name", "default_local_dir"):
            assert first.verl["trainer"][key] != second.verl["trainer"][key]
        customs = [policy.verl["actor_rollout_ref"]["rollout"]["custom"] for policy in (first, second)]
        assert customs[0]["namespace"] == first.namespace and customs[1]["namespace"] == second.namespace
        assert customs[1]["replica_rank_offset"] == second.replica_rank_offset

    def test_checkpoint_folders_are_absolute_and_lie_in_the_run_directory(self, plain_job):
        assert plain_job.run.dir.is_absolute()
        for model_id, policy in plain_job.models.items():
            assert policy.verl["trainer"]["default_local_dir"] == f"{plain_job.run.dir}/checkpoints/{model_id}"
            assert policy.verl["trainer"]["resume_mode"] == "disable"

    def test_two_jobs_with_the_same_models_do_not_share_a_name(self, tmp_path, plain_job):
        assert plain_job.models["planner_model"].namespace != tiny_job(tmp_path).models["planner_model"].namespace

    def test_the_run_directory_alone_decides_the_name(self, tmp_path):
        here = tiny_job(tmp_path).models["planner_model"]
        assert tiny_job(tmp_path, "stop.updates=9").models["planner_model"].namespace == here.namespace

    def test_nccl_groups_are_named_per_model(self, changed_job):
        models = changed_job.models
        groups = {
            p.verl["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["engine_kwargs"]["nccl"]["group_name"]
            for p in models.values()
        }
        assert groups == {policy.namespace for policy in models.values()}

    def test_a_setting_that_the_job_decides_cannot_be_set_to_something_else(self, tmp_path):
        found = problems_of(tmp_path, f"{PLANNER}.trainer.test_freq=5", f"{SOLVER}.actor_rollout_ref.rollout.n=3")
        assert f"{PLANNER}.trainer.test_freq" in found
        assert "workflow.n" in found[f"{SOLVER}.actor_rollout_ref.rollout.n"]


class TestDerived:
    def test_gpus_are_dealt_over_nodes(self, changed_job):
        verl = changed_job.models["planner_model"].verl
        assert (verl["trainer"]["nnodes"], verl["trainer"]["n_gpus_per_node"]) == (2, 4)
        assert (verl["rollout"]["nnodes"], verl["rollout"]["n_gpus_per_node"]) == (1, 2)
        assert verl["actor_rollout_ref"]["rollout"]["n_gpus_per_node"] == 2
        assert "n_gpus" not in verl["trainer"]

    def test_gpus_that_do_not_fill_whole_nodes_are_refused(self, tmp_path):
        assert f"{PLANNER}.trainer.n_gpus" in problems_of(
            tmp_path, "run.gpus_per_node=4", f"{PLANNER}.trainer.n_gpus=6"
        )

    def test_the_learning_rates_horizon_counts_steps_and_not_versions(self, changed_job):
        actors = [p.verl["actor_rollout_ref"]["actor"] for p in changed_job.models.values()]
        assert [actor["optim"]["total_training_steps"] for actor in actors] == [7 * 2, 7 * 3]
        assert changed_job.models["solver_model"].target_updates == 7

    def test_the_group_size_is_the_workflows(self, changed_job):
        verl = changed_job.models["planner_model"].verl
        assert verl["rollout"]["n"] == verl["actor_rollout_ref"]["rollout"]["n"] == 6

    def test_the_lead_follows_verls_rule_when_none_is_given(self, changed_job):
        assert changed_job.models["planner_model"].queue.max_lead_groups == int(4 * 3 * 2 * 1.5)

    def test_queue_settings_stand_beside_verls_and_are_checked_like_them(self, tmp_path, changed_job):
        bounds = {model_id: policy.queue.max_staleness for model_id, policy in changed_job.models.items()}
        assert bounds == {"planner_model": 2, "solver_model": 4}  # policy_defaults of the composition win over queue
        found = problems_of(tmp_path, f"{PLANNER}.async_training.max_stalenes=2")
        assert "max_staleness" in found[f"{PLANNER}.async_training.max_stalenes"]

    def test_a_frozen_model_needs_no_trainer(self, tmp_path):
        policy = tiny_job(tmp_path, f"{PLANNER}.train=false").models["planner_model"]
        assert (policy.train, policy.trainer_gpus, policy.target_updates) == (False, 0, None)

    def test_a_frozen_model_loads_its_weights_where_verl_would_leave_random_ones(self, tmp_path):
        """Nobody sends a frozen policy its weights, as the first sync does for a trained one."""
        models = tiny_job(tmp_path, "device=gpu", f"{PLANNER}.train=false").models
        formats = {m: p.verl["actor_rollout_ref"]["rollout"]["load_format"] for m, p in models.items()}
        assert formats == {"planner_model": "auto", "solver_model": "dummy"}

    def test_random_weights_of_a_frozen_model_are_refused_and_another_format_is_not(self, tmp_path):
        key = f"{PLANNER}.actor_rollout_ref.rollout.load_format"
        frozen = ("device=gpu", f"{PLANNER}.train=false")
        assert key in problems_of(tmp_path, *frozen, f"{key}=dummy")
        policy = tiny_job(tmp_path, *frozen, f"{key}=safetensors").models["planner_model"]
        assert policy.verl["actor_rollout_ref"]["rollout"]["load_format"] == "safetensors"

    def test_the_context_length_is_prompt_plus_response_when_none_is_given(self, changed_job):
        rollout = changed_job.models["planner_model"].verl["actor_rollout_ref"]["rollout"]
        assert rollout["max_model_len"] == 128


class TestModels:
    def test_the_list_form_of_the_rfc_gives_the_same_models(self):
        section = {"model_path": "/path", "trainer": {"n_gpus": 4}}
        keyed, found = normalise_models([{"model_id": "planner_model", **section}, {"model_id": "solver_model"}])
        assert not found
        assert keyed == {"planner_model": section, "solver_model": {}}

    @pytest.mark.parametrize("model_id", ["Planner", "-a", "a b", "ä", "", "validation"])
    def test_an_id_that_cannot_stand_in_a_name_is_refused(self, model_id):
        assert normalise_models([{"model_id": model_id}])[1]

    def test_a_duplicate_id_is_refused(self):
        keyed, found = normalise_models([{"model_id": "a"}, {"model_id": "a"}])
        assert "twice" in str(found[0])

    def test_null_takes_a_model_of_the_composition_out(self, tmp_path):
        job = tiny_job(tmp_path, f"{SOLVER}=null", "agent_model_mapping.solver=planner_model")
        assert list(job.models) == ["planner_model"]

    def test_the_rfcs_example_composes(self, tmp_path):
        for role in ("planner", "solver"):
            model_folder(tmp_path / role)
        (tmp_path / "research.py").write_text("class Research:\n    async def run(self, task, agents): ...\n")
        example = {
            "defaults": ["multi_policy_trainer", "_self_"],
            "multi_model": {
                "enable": True,
                "models": [
                    {
                        "model_id": f"{role}_model",
                        "model_path": f"{tmp_path}/{role}",
                        "trainer": {"n_gpus": 4},
                        "rollout": {"n_gpus": 4},
                        "async_training": {
                            "trigger_parameter_sync_step": 4,
                            "staleness_threshold": 0.5,
                            "partial_rollout": True,
                        },
                    }
                    for role in ("planner", "solver")
                ],
            },
            "gateway": {"mode": "multi_model_router"},
            "agent_model_mapping": {
                "planner_agent": "planner_model",
                "search_agent": "solver_model",
                "answer_agent": "solver_model",
            },
            "workflow": {"name": "Research", "path": str(tmp_path / "research.py")},
            "data": {"train_files": str(tmp_path / "train.parquet")},
        }
        (tmp_path / "train.parquet").touch()
        (tmp_path / "rfc.yaml").write_text(yaml.safe_dump(example))
        job = compose_job("rfc", [f"run.dir={tmp_path}/run"], config_dir=tmp_path)
        assert list(job.models) == ["planner_model", "solver_model"]
        assert job.models["solver_model"].trainer_gpus == 4


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))
def test_every_composition_of_the_recipe_names_only_known_keys(name, tmp_path, monkeypatch):
    """Its models and tasks need not be there; everything else must be right."""
    monkeypatch.chdir(tmp_path)
    raw = compose_raw(name, [])
    try:
        compose_job(name)
    except ConfigError as error:
        expected = {"data.train_files", "data.val_files"}
        models = [model for model, section in (raw.models or {}).items() if section is not None]
        expected |= {f"multi_model.models.{model}.model_path" for model in models}
        if name == "multi_policy_trainer":  # the base names no model
            expected |= {"multi_model.models", "agent_model_mapping"}
        assert {problem.key for problem in error.problems} <= expected, error


def test_relative_paths_are_taken_from_where_the_command_runs(tmp_path, monkeypatch):
    overrides = tiny_overrides(tmp_path)
    monkeypatch.chdir(tmp_path)
    job = compose_job("planner_solver_tiny", [*overrides, f"{PLANNER}.model_path=planner", "run.dir=here"])
    assert job.models["planner_model"].model_path == str(tmp_path / "planner")
    assert job.run.dir == Path(tmp_path / "here")
