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

import numpy as np
import pytest

from ..configuration.explain import explain
from ..configuration.training_checks import ESTIMATORS, GROUP_ESTIMATORS, REFUSED_ESTIMATORS, replay_problems
from .config_fixtures import PLANNER, SOLVER, problems_of, tiny_job
from .fakes.workflow_records import queue_spec

BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
QUEUE = f"{PLANNER}.async_training"


def planner(*settings: str) -> list[str]:
    """Overrides of the planner, whose batches have four groups."""
    return [f"{PLANNER}.{setting}" for setting in (BATCH, *settings)]


def queue(**settings) -> list[str]:
    return planner(*(f"async_training.{key}={value}" for key, value in settings.items()))


class TestQueues:
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
    def test_the_lead_must_reach_a_weight_version(self, tmp_path, settings, enough):
        """Invariant 10: at its lead a policy admits nothing, so a smaller lead waits forever."""
        job = tiny_job(tmp_path, *queue(**settings, max_lead_groups=enough))
        assert job.models["planner_model"].queue.max_lead_groups == enough
        found = problems_of(tmp_path, *queue(**settings, max_lead_groups=enough - 1))
        assert list(found) == [f"{QUEUE}.max_lead_groups"] and f">= {enough}" in found[f"{QUEUE}.max_lead_groups"]

    def test_a_derived_lead_that_is_too_small_names_the_setting_behind_it(self, tmp_path):
        assert tiny_job(tmp_path, *queue(staleness_threshold=0))
        found = problems_of(tmp_path, *queue(staleness_threshold=-0.5))
        assert list(found) == [f"{QUEUE}.staleness_threshold"]

    def test_the_queue_must_hold_a_batch(self, tmp_path):
        assert tiny_job(tmp_path, *queue(max_queue_groups=4))
        assert list(problems_of(tmp_path, *queue(max_queue_groups=3))) == [f"{QUEUE}.max_queue_groups"]

    def test_the_queue_may_be_as_small_as_the_smallest_batch(self, tmp_path):
        assert tiny_job(tmp_path, *queue(max_queue_groups=2, min_batch_groups=2))
        assert problems_of(tmp_path, *queue(max_queue_groups=2, min_batch_groups=3))

    def test_no_group_may_be_asked_to_be_larger_than_the_attempts_at_a_task(self, tmp_path):
        assert tiny_job(tmp_path, "workflow.n=4", f"{QUEUE}.min_group_size=4")
        assert list(problems_of(tmp_path, "workflow.n=4", f"{QUEUE}.min_group_size=5")) == [f"{QUEUE}.min_group_size"]

    def test_a_frozen_models_queue_is_not_looked_at(self, tmp_path):
        assert tiny_job(tmp_path, f"{PLANNER}.train=false", *queue(max_lead_groups=1, min_group_size=99))

    def test_explain_tells_when_the_bound_on_staleness_is_tighter_than_the_lead(self, tmp_path):
        note = "max_staleness=1 drops those that do"
        assert note not in explain(tiny_job(tmp_path, *queue(max_staleness=1)))
        shown = explain(tiny_job(tmp_path, *queue(max_staleness=1, staleness_threshold=2)))
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

    def test_it_is_off_by_default(self, tmp_path):
        assert tiny_job(tmp_path).models["planner_model"].queue.replay.max_uses == 1

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

    @pytest.mark.parametrize(
        ("correction", "key"),
        [({"bypass_mode": False}, "rollout_is"), ({"loss_type": "reinforce", "rollout_is": "token"}, "loss_type")],
    )
    def test_others_are_refused(self, correction, key):
        assert refusals(FakePolicy(**correction)) == [f"{self.CORRECTION}.{key}"]
        assert refusals(FakePolicy(**correction), max_uses=1) == [], "without replay they are the user's own affair"

    def test_on_policy_training_has_nothing_to_replay(self):
        assert refusals(FakePolicy(), max_staleness=0) == ["async_training.replay.max_uses"]

    def test_a_frozen_model_is_not_looked_at(self):
        assert refusals(FakePolicy(trained=False, bypass_mode=False), max_staleness=0) == []

    def test_a_job_reports_it_beside_its_other_problems(self, tmp_path):
        correction = f"{PLANNER}.{self.CORRECTION}"
        found = problems_of(
            tmp_path,
            f"{QUEUE}.replay.max_uses=2",
            f"{correction}.bypass_mode=false",
            f"{SOLVER}.async_training.replay.max_use=2",
        )
        assert set(found) == {f"{correction}.rollout_is", f"{SOLVER}.async_training.replay.max_use"}
        assert "importance weights" in found[f"{correction}.rollout_is"]


class TestShuffling:
    def test_rows_of_several_mini_batches_may_not_be_shuffled(self, tmp_path):
        shuffled = f"{PLANNER}.actor_rollout_ref.actor.shuffle=true"
        assert tiny_job(tmp_path, shuffled)
        found = problems_of(tmp_path, shuffled, f"{PLANNER}.async_training.require_batches=2")
        assert list(found) == [f"{PLANNER}.actor_rollout_ref.actor.shuffle"]

    def test_neither_may_those_of_a_critic(self, tmp_path):
        critic = ["device=gpu", f"{PLANNER}.algorithm.adv_estimator=gae", f"{PLANNER}.critic.shuffle=true"]
        assert tiny_job(tmp_path, *critic)
        found = problems_of(tmp_path, *critic, f"{PLANNER}.async_training.require_batches=2")
        assert list(found) == [f"{PLANNER}.critic.shuffle"]


class TestEstimators:
    @pytest.mark.parametrize("name", [*REFUSED_ESTIMATORS, "my_own"])
    def test_an_estimator_that_padding_or_missing_data_breaks_is_refused(self, tmp_path, name):
        key = f"{PLANNER}.algorithm.adv_estimator"
        found = problems_of(tmp_path, "device=gpu", f"{key}={name}")
        assert list(found) == [key] and "reinforce_plus_plus_baseline" in found[key]

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_the_others_are_accepted(self, tmp_path, name):
        assert tiny_job(tmp_path, "device=gpu", f"policy_defaults.algorithm.adv_estimator={name}")

    def test_a_frozen_model_may_carry_any(self, tmp_path):
        assert tiny_job(tmp_path, f"{SOLVER}.train=false", f"{SOLVER}.algorithm.adv_estimator=gpg")

    def test_reweighting_that_draws_rows_anew_is_refused(self, tmp_path):
        key = f"{PLANNER}.algorithm.use_pf_ppo"
        assert list(problems_of(tmp_path, f"{key}=true")) == [key]

    def test_every_estimator_of_verl_is_judged(self):
        core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        assert set(core_algos.AdvantageEstimator) == {*ESTIMATORS, *REFUSED_ESTIMATORS}

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_padding_does_not_change_the_advantages_of_real_rows(self, name):
        np.testing.assert_allclose(advantages(name, pads=5), advantages(name, pads=0), rtol=1e-5, atol=1e-6)

    def test_padding_changes_those_of_gpg(self):
        """What the refusal is for."""
        assert not np.allclose(advantages("gpg", pads=5), advantages("gpg", pads=0))

    def test_the_estimators_that_compare_a_group_need_one(self, tmp_path):
        for name in GROUP_ESTIMATORS:
            overrides = ["workflow.n=1", "queue.min_group_size=1", f"policy_defaults.algorithm.adv_estimator={name}"]
            assert list(problems_of(tmp_path, *overrides)) == ["workflow.n"]


def advantages(name: str, pads: int) -> np.ndarray:
    """verl's advantages ``[8, 4]`` of two groups of four rows, with padding rows as batch assembly makes them."""
    torch = pytest.importorskip("torch")
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([4, 2, 3, 1, 4, 4, 2, 3] + [0] * pads)
    mask = (torch.arange(4) < lengths[:, None]).long()
    rewards = torch.zeros(mask.shape)
    rewards[range(8), lengths[:8] - 1] = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.0])
    values = torch.rand((8, 4), generator=draw)
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_rewards": rewards,
            "values": torch.cat([values, torch.full((pads, 4), 7.0)]),
        },
        non_tensors={"uid": np.array(["a/p"] * 4 + ["b/p"] * 4 + [f"pad-{i}" for i in range(pads)], dtype=object)},
    )
    config = AlgoConfig(adv_estimator=name)
    return compute_advantage(data, name, gamma=0.9, lam=0.8, config=config).batch["advantages"][:8].numpy()
