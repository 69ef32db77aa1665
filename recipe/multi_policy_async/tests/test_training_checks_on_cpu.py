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
"""Settings that would let a job wait forever, or spoil its updates, are refused before it starts."""

import copy
import json

import pytest

from ..configuration.compose import build_job, compose_raw, queue_settings
from ..configuration.errors import Problem
from ..configuration.explain import explain
from ..configuration.policy import JobContext, PolicyBuilder
from ..configuration.training_checks import (
    AVERAGE_ESTIMATORS,
    CPU_PLUGIN,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    REFUSED_ESTIMATORS,
    correction_problems,
    estimator_problems,
    group_problems,
    image_problems,
    loss_problems,
    micro_batch_problems,
    queue_problems,
    replay_problems,
    shuffle_problems,
)
from ..ingest.spec import QueueSpec
from .config_fixtures import PLANNER, SOLVER, problems_of, tiny_job, tiny_overrides
from .fakes.workflow_records import queue_spec

BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return compose_raw("planner_solver_tiny", tiny_overrides(tmp_path_factory.mktemp("job")))


@pytest.fixture(scope="module")
def built(raw) -> PolicyBuilder:
    """The planner of the tiny job, resolved once."""
    context = JobContext(raw.job, raw.device, raw.overlay, raw.policy_defaults)
    policy = PolicyBuilder("planner_model", 0, raw.models["planner_model"], context)
    policy.build()
    assert not policy.problems
    return policy


@pytest.fixture
def planner(built):
    """Makes the planner with other settings, given as dotted key and value; its batches have four groups."""

    def make(settings: dict, train: bool = True) -> PolicyBuilder:
        policy = copy.copy(built)
        policy.tree, policy.ours = copy.deepcopy(built.tree), {**built.ours, "train": train}
        for dotted, value in {BATCH: 4, **settings}.items():
            *sections, name = dotted.split(".")
            node = policy.tree
            for section in sections:
                node = node[section]
            assert name in node, dotted
            node[name] = value
        return policy

    return make


def queue_found(policy: PolicyBuilder, group_size: int = 8) -> list[Problem]:
    return list(queue_problems(policy, QueueSpec(**queue_settings(policy)), group_size))


class TestQueues:
    @pytest.fixture
    def found(self, planner):
        """Finds the problems of the planner's queue with these settings, by the name of the setting."""

        def find(**settings) -> dict[str, str]:
            policy = planner({f"async_training.{key}": value for key, value in settings.items()})
            return {p.key.removeprefix(f"{PLANNER}.async_training."): str(p) for p in queue_found(policy)}

        return find

    @pytest.mark.parametrize(
        ("settings", "enough"),
        [
            ({}, 4),
            ({"trigger_parameter_sync_step": 3}, 12),
            ({"trigger_parameter_sync_step": 3, "require_batches": 2}, 24),
            ({"trigger_parameter_sync_step": 3, "min_batch_groups": 1}, 9),  # two full batches, then one group
            ({"min_batch_groups": 9}, 4),
        ],
    )
    def test_the_lead_must_reach_a_weight_version(self, found, settings, enough):
        """Invariant 10: at its lead a policy admits nothing, so a smaller lead waits forever."""
        assert not found(**settings, max_lead_groups=enough)
        problems = found(**settings, max_lead_groups=enough - 1)
        assert list(problems) == ["max_lead_groups"] and f">= {enough}" in problems["max_lead_groups"]

    def test_a_derived_lead_that_is_too_small_names_the_setting_behind_it(self, found):
        assert not found(staleness_threshold=0)
        assert list(found(staleness_threshold=-0.5)) == ["staleness_threshold"]

    def test_the_queue_must_hold_a_batch(self, found):
        assert not found(max_queue_groups=4)
        assert list(found(max_queue_groups=3)) == ["max_queue_groups"]

    def test_the_queue_may_be_as_small_as_the_smallest_batch(self, found):
        assert not found(max_queue_groups=2, min_batch_groups=2)
        assert list(found(max_queue_groups=2, min_batch_groups=3)) == ["max_queue_groups"]

    def test_a_largest_batch_below_the_batch_itself_would_do_nothing(self, found):
        assert not found(max_batch_groups=4)
        assert list(found(max_batch_groups=3)) == ["max_batch_groups"]

    def test_no_group_may_be_asked_to_be_larger_than_the_attempts_at_a_task(self, planner):
        policy = planner({"async_training.min_group_size": 4})
        assert not queue_found(policy, group_size=4)
        assert [p.key for p in queue_found(policy, group_size=3)] == [f"{PLANNER}.async_training.min_group_size"]

    def test_a_frozen_models_queue_is_not_looked_at(self, planner):
        settings = {"async_training.max_lead_groups": 1, "async_training.min_group_size": 99}
        assert queue_found(planner(settings))
        assert not queue_found(planner(settings, train=False))

    @pytest.mark.slow
    @pytest.mark.parametrize(("rule", "price"), [("any", "loses surplus"), ("all", "waits for the slowest")])
    def test_explain_tells_which_rule_admits_tasks_and_what_it_costs(self, tmp_path, rule, price):
        shown = explain(tiny_job(tmp_path, f"ingest.admission={rule}", f"{PLANNER}.async_training.max_queue_groups=9"))
        assert f"schedule all, admission {rule}" in shown and price in shown
        assert "planner_model: a lead of 16 groups, of which 9 may be queued" in shown

    @pytest.mark.slow
    def test_explain_tells_when_the_bound_on_staleness_is_tighter_than_the_lead(self, tmp_path):
        note = "max_staleness=1 drops those that do"
        settings = [f"{PLANNER}.{BATCH}=4", f"{PLANNER}.async_training.max_staleness=1"]
        assert note not in explain(tiny_job(tmp_path, *settings))
        shown = explain(tiny_job(tmp_path, *settings, f"{PLANNER}.async_training.staleness_threshold=2"))
        assert f"planner_model: a lead of 12 groups lets one wait 2 versions, and {note}" in shown


class FakePolicy:
    """A trained policy of which only the rollout correction is known."""

    def __init__(self, trained: bool = True, **correction):
        verl = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None}  # its fully async defaults
        self.ours, self._correction = {"train": trained}, verl | correction

    def get(self, dotted: str):
        assert dotted == "algorithm.rollout_correction"
        return self._correction

    def key(self, dotted: str) -> str:
        return dotted


def refusals(policy: FakePolicy, max_uses: int = 2, **settings) -> list[str]:
    spec = queue_spec(replay={"max_uses": max_uses, "max_age": 4, "max_share": 0.5}, **settings)
    return [problem.key for problem in replay_problems(policy, spec)]


class TestReplay:
    CORRECTION = "algorithm.rollout_correction"

    def test_it_is_off_by_default(self, plain_job):
        assert plain_job.models["planner_model"].queue.replay.max_uses == 1

    @pytest.mark.parametrize(
        "correction",
        [
            {},  # bypass_mode: the ratio of PPO is to the policy that sampled
            {"bypass_mode": False, "rollout_is": "token"},
            {"bypass_mode": False, "rollout_is": "sequence"},
        ],
    )
    def test_old_rows_need_importance_weights_and_these_settings_give_them(self, correction):
        assert refusals(FakePolicy(**correction), max_staleness=4) == []

    def test_others_are_refused(self):
        without = FakePolicy(bypass_mode=False)
        assert refusals(without) == [f"{self.CORRECTION}.rollout_is"]
        assert refusals(without, max_uses=1) == [], "without replay it is the user's own affair"

    def test_on_policy_training_has_nothing_to_replay(self):
        assert refusals(FakePolicy(), max_staleness=0) == ["async_training.replay.max_uses"]

    def test_a_frozen_model_is_not_looked_at(self):
        assert refusals(FakePolicy(trained=False, bypass_mode=False), max_staleness=0) == []

    @pytest.mark.slow
    def test_a_job_reports_it_beside_its_other_problems(self, tmp_path):
        correction = f"{PLANNER}.{self.CORRECTION}"
        found = problems_of(
            tmp_path,
            f"{PLANNER}.async_training.replay.max_uses=2",
            f"{correction}.bypass_mode=false",
            f"{SOLVER}.async_training.replay.max_use=2",
        )
        assert set(found) == {f"{correction}.rollout_is", f"{SOLVER}.async_training.replay.max_use"}
        assert "importance weights" in found[f"{correction}.rollout_is"]


class TestRolloutCorrection:
    AT = "algorithm.rollout_correction"

    def found(self, planner, **correction) -> list[str]:
        settings = {f"{self.AT}.{key}": value for key, value in correction.items()}
        return [problem.key for problem in correction_problems(planner(settings))]

    @pytest.mark.parametrize(
        ("key", "value"), [("rollout_is", "token"), ("rollout_rs", "seq_mean_k1"), ("loss_type", "reinforce")]
    )
    def test_what_bypass_mode_never_brings_to_the_workers_is_refused(self, planner, key, value):
        """They trained on as if nothing had been asked for."""
        assert self.found(planner, bypass_mode=True, **{key: value}) == [f"{PLANNER}.{self.AT}.{key}"]
        assert self.found(planner, bypass_mode=False, **{key: value}) == []

    def test_verls_own_defaults_are_accepted(self, planner):
        assert self.found(planner) == []


class TestShuffling:
    @pytest.mark.parametrize(
        ("key", "estimator"), [("actor_rollout_ref.actor.shuffle", "grpo"), ("critic.shuffle", "gae")]
    )
    def test_rows_of_several_mini_batches_may_not_be_shuffled(self, planner, key, estimator):
        settings = {key: True, "algorithm.adv_estimator": estimator}
        assert not list(shuffle_problems(planner(settings)))
        several = planner({**settings, "async_training.require_batches": 2})
        assert [problem.key for problem in shuffle_problems(several)] == [f"{PLANNER}.{key}"]

    def test_the_critics_order_is_not_looked_at_without_one(self, planner):
        settings = {"critic.shuffle": True, "async_training.require_batches": 2}
        assert not list(shuffle_problems(planner(settings)))


class TestEstimators:
    KEY = "algorithm.adv_estimator"

    @pytest.mark.parametrize("name", REFUSED_ESTIMATORS)
    def test_an_estimator_that_padding_or_missing_data_breaks_is_refused(self, planner, name):
        (problem,) = estimator_problems(planner({self.KEY: name}), group_size=8)
        assert problem.key == f"{PLANNER}.{self.KEY}" and "reinforce_plus_plus_baseline" in str(problem)

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_the_others_are_accepted(self, planner, name):
        assert not list(estimator_problems(planner({self.KEY: name}), group_size=8))

    def test_one_of_the_users_own_modules_is_left_to_the_trainer_which_tries_it(self, planner, monkeypatch):
        own = planner({self.KEY: "my_own"})
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", CPU_PLUGIN)  # ours registers none
        (problem,) = estimator_problems(own, group_size=8)
        assert problem.key == f"{PLANNER}.{self.KEY}" and "VERL_USE_EXTERNAL_MODULES" in str(problem)
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_package.estimators")
        assert not list(estimator_problems(own, group_size=8))

    def test_a_setting_that_verl_does_not_pass_on_is_refused(self, planner):
        without = {"algorithm.norm_adv_by_std_in_grpo": False}
        assert not list(estimator_problems(planner({**without, self.KEY: "grpo"}), group_size=8))
        (problem,) = estimator_problems(planner({**without, self.KEY: "grpo_vectorized"}), group_size=8)
        assert problem.key == f"{PLANNER}.algorithm.norm_adv_by_std_in_grpo"

    def test_a_frozen_model_may_carry_any(self, planner):
        assert not list(estimator_problems(planner({self.KEY: "gpg"}, train=False), group_size=8))

    def test_the_estimators_that_compare_a_group_need_one(self, planner):
        for name in GROUP_ESTIMATORS:
            assert [p.key for p in estimator_problems(planner({self.KEY: name}), group_size=1)] == ["workflow.n"]

    def test_but_one_attempt_at_a_task_is_enough_where_it_is_compared_with_a_moving_average(self, planner):
        policy = planner({"async_training.on_small_group": "ema"})
        assert not list(estimator_problems(policy, group_size=1))
        assert not queue_found(policy, group_size=1)  # min_group_size is 2, so every group is small


class TestGroups:
    @pytest.fixture
    def found(self, planner):
        def find(estimator: str, rows: str = "per_call", **settings) -> list[str]:
            queue = {f"async_training.{key}": value for key, value in settings.items()}
            policy = planner({"algorithm.adv_estimator": estimator, **queue})
            problems = group_problems(policy, QueueSpec(**queue_settings(policy)), rows)
            return [problem.key.removeprefix(f"{PLANNER}.async_training.") for problem in problems]

        return find

    def test_averages_need_an_estimator_that_hands_them_through(self, found):
        for name in ESTIMATORS:
            expected = [] if name in AVERAGE_ESTIMATORS else ["on_small_group"]
            assert found(name, on_small_group="ema") == expected, name
        assert found("my_own", on_small_group="ema") == ["on_small_group"]
        assert not found("gae", on_small_group="drop")

    def test_filtering_needs_an_estimator_that_compares_groups(self, found):
        refused = [name for name in (*ESTIMATORS, "my_own") if found(name, filter_equal_rewards=True)]
        assert refused == ["reinforce_plus_plus", "gae"]

    def test_groups_by_turn_need_one_row_per_turn(self, found):
        assert found("grpo", rows="merged", group_by="task_agent_turn") == ["group_by"]
        assert not found("grpo", rows="per_call", group_by="task_agent_turn")
        assert not found("grpo", rows="merged", group_by="task_agent")

    def test_an_average_for_no_group_is_refused(self, found):
        with pytest.raises(ValueError, match="no small groups while min_group_size is 1"):
            found("grpo", on_small_group="ema", min_group_size=1)


class TestLosses:
    ACTOR = "actor_rollout_ref.actor"

    def test_the_normed_loss_needs_a_scale_that_padding_does_not_change(self, planner):
        settings = {f"{self.ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
        (problem,) = loss_problems(planner(settings))
        assert problem.key == f"{PLANNER}.{self.ACTOR}.loss_scale_factor"
        assert not list(loss_problems(planner({**settings, f"{self.ACTOR}.loss_scale_factor": 16})))

    @pytest.mark.parametrize("mode", ["geo_mean", "bypass_mode"])
    def test_a_loss_that_does_not_stand_padding_rows_is_refused(self, planner, mode):
        (problem,) = loss_problems(planner({f"{self.ACTOR}.policy_loss.loss_mode": mode}))
        assert problem.key == f"{PLANNER}.{self.ACTOR}.policy_loss.loss_mode"

    def test_a_kl_controller_that_follows_a_mean_over_padding_rows_is_refused(self, planner):
        settings = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
        (problem,) = loss_problems(planner(settings))
        assert problem.key == f"{PLANNER}.algorithm.kl_ctrl.type"
        assert not list(loss_problems(planner({**settings, "algorithm.kl_ctrl.type": "fixed"})))
        assert not list(loss_problems(planner({**settings, "algorithm.use_kl_in_reward": False})))


class TestMicroBatches:
    OFF = {
        "actor_rollout_ref.actor.use_dynamic_bsz": False,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": False,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False,
        "critic.use_dynamic_bsz": False,
    }
    ACTOR = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
    CRITIC = "critic.ppo_micro_batch_size_per_gpu"
    REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"

    def sizes(self, settings: dict) -> dict:
        keys = [f"actor_rollout_ref.{key}" for key in self.ACTOR] + [self.REFERENCE, self.CRITIC]
        return {**self.OFF, **dict.fromkeys(keys, 2), **settings}

    @pytest.mark.parametrize(
        ("settings", "more"),
        [
            ({}, []),
            ({"actor_rollout_ref.actor.use_kl_loss": True}, [REFERENCE]),
            ({"algorithm.adv_estimator": "gae"}, [CRITIC]),
        ],
    )
    def test_micro_batches_of_several_rows_are_refused_where_they_are_not_cut_by_tokens(self, planner, settings, more):
        """verl asserts that a rank's rows divide by them; a batch has as many rows as there are."""
        found = [problem.key for problem in micro_batch_problems(planner(self.sizes(settings)))]
        assert found == [f"{PLANNER}.{key}" for key in [*(f"actor_rollout_ref.{key}" for key in self.ACTOR), *more]]

    def test_micro_batches_of_one_row_and_by_tokens_are_accepted(self, planner):
        ones = {key: 1 for key in self.sizes({}) if "micro_batch" in key}
        assert not list(micro_batch_problems(planner(self.sizes(ones))))
        assert not list(micro_batch_problems(planner({})))


@pytest.mark.slow
def test_a_composed_job_is_checked_for_all_of_it_and_for_reweighting_that_draws_rows_anew(tmp_path, raw):
    assert build_job(raw)
    wrong = {
        "algorithm.adv_estimator": "gpg",
        "algorithm.use_pf_ppo": "true",
        "algorithm.filter_groups.enable": "true",  # verl's fully async trainer does not read it
        "async_training.on_small_group": "ema",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean",
        "async_training.max_queue_groups": 1,
        "async_training.require_batches": 2,
        "actor_rollout_ref.actor.shuffle": "true",
    }
    found = problems_of(tmp_path, *(f"{PLANNER}.{key}={value}" for key, value in wrong.items()))
    assert set(found) == {f"{PLANNER}.{key}" for key in wrong if key != "async_training.require_batches"}


@pytest.mark.parametrize(
    ("kind", "train", "refused"),
    [
        ("qwen2_5_vl", True, True),
        ("glm4v", True, True),
        ("qwen2_5_vl", False, False),
        ("qwen3_vl", True, False),
        ("qwen3", True, False),
    ],
)
def test_a_model_that_verl_cannot_train_on_rows_without_an_image_is_refused(planner, tmp_path, kind, train, refused):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    policy = planner({}, train=train)
    policy.ours["model_path"] = str(tmp_path)
    found = list(image_problems(policy))
    assert [problem.key for problem in found] == (["multi_model.models.planner_model.model_path"] if refused else [])
    assert all(kind in problem.what for problem in found)
