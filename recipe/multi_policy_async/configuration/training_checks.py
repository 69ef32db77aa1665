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
"""Settings of a trained policy that would spoil its updates, or let its job wait forever, without an error anywhere."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..ingest.spec import QueueSpec
from .errors import Problem
from .overlay import get
from .policy import PolicyBuilder

CPU_PLUGIN = f"{__package__.rpartition('.')[0]}.backends.cpu.plugin"

GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
"""Estimators that compare the members of a group (verl/trainer/ppo/core_algos.py); a padding row is one of its own."""

ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
"""Estimators whose advantages of real rows padding does not change; the last three whiten by the response mask."""

AVERAGE_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators that hand a group of one its reward as advantage, so that a baseline can be taken off beforehand."""

COMPARING_ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus_baseline")
"""Estimators to which a group of equal rewards says nothing; of a user's own, the user knows."""

_NO_SQUARES = "the sums of squared probabilities are not there where the rollout's log-probs are used"

REFUSED_ESTIMATORS = {
    # core_algos.py:compute_gpg_outcome_advantage scales all rows by rows / non-zero rewards
    "gpg": "its scale counts padding rows",
    # compute_grpo_passk_outcome_advantage raises on a group of one, and a padding row is one
    "grpo_passk": "it refuses padding rows, which are groups of one",
    # compute_remax_outcome_advantage wants reward_baselines, from a greedy rollout that no workflow plays
    "remax": "nobody produces its greedy baseline",
    # compute_gdpo_outcome_advantage wants a reward column per component; a trajectory has one reward
    "gdpo": "a trajectory carries one reward, not its components",
    # ray_trainer.py:compute_advantage asserts sum_pi_squared; it comes with log-probs that the trainer computes, and
    # verl's fully async trainer takes those of the rollout
    "optimal_token_baseline": _NO_SQUARES,
    "tir_optimal_token_baseline": _NO_SQUARES,
}


_REFUSED_LOSSES = {
    "geo_mean": "it averages over all rows of a micro batch, padding among them",
    # core_algos.py:compute_policy_loss_bypass_mode raises without a sampled token, and wants a rollout_correction that
    # the workers do not have
    "bypass_mode": "verl sets it itself; it fails on a micro batch of padding alone",
}

NEED_IMAGES = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "glm4v": "glm4v"}
"""Model types whose forward in verl 0.9.1 fails on a micro batch without an image, and its module. With transformers 5
the vision tower gives an object that has no ``mean`` (verl/models/transformers/<module>.py:_get_input_embeds)."""


def batch_groups(tree: dict[str, Any]) -> int:
    """Advantage groups of one training step, as ``ModelAsyncRuntime`` takes them."""
    size = get(tree, "actor_rollout_ref.actor.ppo_mini_batch_size")
    return size * get(tree, "async_training.require_batches")


def groups_per_version(tree: dict[str, Any]) -> int:
    """Advantage groups between two weight versions."""
    return batch_groups(tree) * get(tree, "async_training.trigger_parameter_sync_step")


def estimator_problems(policy: PolicyBuilder, group_size: int) -> Iterable[Problem]:
    """The advantage estimator is one of ``ESTIMATORS``, and has groups to compare where it needs them.

    One that verl does not ship may come from the user's own modules; the trainer tries it (runtime/estimator_check.py).
    """
    if not policy.ours["train"]:
        return
    estimator = policy.get("algorithm.adv_estimator")
    key = policy.key("algorithm.adv_estimator")
    if estimator in REFUSED_ESTIMATORS:
        what = f"is not supported: {REFUSED_ESTIMATORS[estimator]}"
        yield Problem(key, what, estimator, allowed=", ".join(ESTIMATORS))
    elif estimator not in ESTIMATORS and not user_modules():
        fix = "name the module that registers yours in the environment variable VERL_USE_EXTERNAL_MODULES"
        yield Problem(key, "is none of verl's", estimator, allowed=", ".join(ESTIMATORS), fix=fix)
    if estimator == "grpo_vectorized" and not policy.get("algorithm.norm_adv_by_std_in_grpo"):
        key = policy.key("algorithm.norm_adv_by_std_in_grpo")
        yield Problem(key, "is not passed to grpo_vectorized, which always divides", False, fix="adv_estimator: grpo")
    if estimator in GROUP_ESTIMATORS and group_size < 2 and policy.get("async_training.on_small_group") != "ema":
        what = f"{estimator} of {policy.model_id} compares the members of a group"
        yield Problem("workflow.n", what, group_size, fix=">= 2, or async_training.on_small_group=ema")


def user_modules() -> list[str]:
    """Modules that every process of the job imports with verl, by the user's environment."""
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    return [module for module in modules if module and module != CPU_PLUGIN]


def image_problems(policy: PolicyBuilder) -> Iterable[Problem]:
    """verl can train the model on rows without an image, which padding rows are."""
    path = policy.ours["model_path"]
    if not policy.ours["train"] or not isinstance(path, str) or not (config := Path(path) / "config.json").is_file():
        return
    kind = json.loads(config.read_text()).get("model_type")
    if kind in NEED_IMAGES:
        what = (
            f"is a {kind}, whose forward in verl 0.9.1 fails on a micro batch without an image "
            f"(verl/models/transformers/{NEED_IMAGES[kind]}.py), which padding may be"
        )
        yield Problem(policy.key("model_path"), what, str(policy.ours["model_path"]), fix="a Qwen3-VL, or train: false")


def loss_problems(policy: PolicyBuilder) -> Iterable[Problem]:
    """The loss is the same for any amount of padding."""
    if not policy.ours["train"]:
        return
    actor = policy.get("actor_rollout_ref.actor")
    at = policy.key("actor_rollout_ref.actor")
    if actor["loss_agg_mode"] == "seq-mean-token-sum-norm" and not actor["loss_scale_factor"]:
        # core_algos.py:agg_loss divides by the width of the micro batch, here that of its longest response
        what = "is needed by loss_agg_mode=seq-mean-token-sum-norm: without it the loss depends on padding"
        fix = f"data.max_response_length, {policy.get('data.max_response_length')}"
        yield Problem(f"{at}.loss_scale_factor", what, actor["loss_scale_factor"], fix=fix)
    loss_mode = actor["policy_loss"]["loss_mode"]
    if loss_mode in _REFUSED_LOSSES:
        yield Problem(f"{at}.policy_loss.loss_mode", f"is not supported: {_REFUSED_LOSSES[loss_mode]}", loss_mode)
    if policy.get("algorithm.use_kl_in_reward") and policy.get("algorithm.kl_ctrl.type") == "adaptive":
        # ray_trainer.py:apply_kl_penalty gives the controller the mean over all rows
        what = "is not supported: it steers by a mean over all rows of a batch, padding among them"
        yield Problem(policy.key("algorithm.kl_ctrl.type"), what, "adaptive", fix="fixed")


def micro_batch_problems(policy: PolicyBuilder) -> Iterable[Problem]:
    """Micro batches fit any number of rows: verl cuts a rank's rows by tokens, or else into parts of equal size and
    fails where that leaves a rest (workers/engine/utils.py:prepare_micro_batches). A batch has as many as there are."""
    if not policy.ours["train"]:
        return
    at = "actor_rollout_ref"
    switches = {f"{at}.actor.use_dynamic_bsz": f"{at}.actor.ppo_micro_batch_size_per_gpu"}
    switches[f"{at}.rollout.log_prob_use_dynamic_bsz"] = f"{at}.rollout.log_prob_micro_batch_size_per_gpu"
    if policy.get(f"{at}.actor.use_kl_loss") or policy.get("algorithm.use_kl_in_reward"):
        switches[f"{at}.ref.log_prob_use_dynamic_bsz"] = f"{at}.ref.log_prob_micro_batch_size_per_gpu"
    if policy.get("critic.enable") or policy.get("algorithm.adv_estimator") == "gae":
        switches["critic.use_dynamic_bsz"] = "critic.ppo_micro_batch_size_per_gpu"
    for switch, size in switches.items():
        if not policy.get(switch) and policy.get(size) != 1:
            what = f"cuts rows into equal parts while {switch} is off, but their number varies from batch to batch"
            yield Problem(policy.key(size), what, policy.get(size), allowed="1", fix=f"{switch}=true")


def correction_problems(policy: PolicyBuilder) -> Iterable[Problem]:
    """What is asked of the rollout correction reaches the loss.

    With ``bypass_mode`` the clipped ratio of PPO is to the rollout's log-probs, and that is all: verl 0.9.1 sets the
    rest on the trainer's copy of the actor's configuration (rollout_corr_helper.py:apply_bypass_mode), when the workers
    have theirs already.
    """
    if not policy.ours["train"]:
        return
    correction, at = policy.get("algorithm.rollout_correction"), policy.key("algorithm.rollout_correction")
    if not correction["bypass_mode"]:
        return
    for key, without in {"loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}.items():
        if correction[key] != without:
            fix = "null, or bypass_mode: false" if without is None else without
            yield Problem(f"{at}.{key}", "never reaches the workers with bypass_mode: true", correction[key], fix=fix)


def group_problems(policy: PolicyBuilder, queue: QueueSpec, rows: str) -> Iterable[Problem]:
    """Groups fit the estimator that sees them, and the rows that are in them.

    Args:
        policy: the model.
        queue: its queue.
        rows: ``gateway.rows``.
    """
    if not policy.ours["train"]:
        return
    estimator = policy.get("algorithm.adv_estimator")
    at = policy.key("async_training")
    if queue.on_small_group == "ema" and estimator not in AVERAGE_ESTIMATORS:
        what = f"needs an estimator that takes a lone row's reward as its advantage, which {estimator} does not"
        yield Problem(f"{at}.on_small_group", what, "ema", allowed=f"with {', '.join(AVERAGE_ESTIMATORS)}")
    if queue.filter_equal_rewards and estimator in ESTIMATORS and estimator not in COMPARING_ESTIMATORS:
        what = f"would take from {estimator}, which does not compare groups, rows that it can learn from"
        yield Problem(f"{at}.filter_equal_rewards", what, True, allowed=f"with {', '.join(COMPARING_ESTIMATORS)}")
    if queue.group_by == "task_agent_turn" and rows == "merged":
        what = "needs one row per turn, but gateway.rows=merged puts several into one"
        yield Problem(f"{at}.group_by", what, queue.group_by, fix="gateway.rows=per_call")


def shuffle_problems(policy: PolicyBuilder) -> Iterable[Problem]:
    """Rows keep the places that batch assembly gave them: shuffled, a mini-batch may be padding alone, whose loss is
    0/0."""
    if not policy.ours["train"] or policy.get("async_training.require_batches") < 2:
        return
    uses_critic = policy.get("critic.enable") or policy.get("algorithm.adv_estimator") == "gae"
    keys = ["actor_rollout_ref.actor.shuffle", *(["critic.shuffle"] if uses_critic else [])]
    for key in keys:
        if policy.get(key):
            what = "undoes how real and padding rows are dealt over the mini-batches of async_training.require_batches"
            yield Problem(policy.key(key), what, policy.get(key), fix="false")


def replay_problems(policy: PolicyBuilder, queue: QueueSpec) -> Iterable[Problem]:
    """Old rows are weighed by the ratio of the trained policy to the one that sampled, and can be young enough."""
    if not policy.ours["train"] or queue.replay.max_uses == 1:
        return
    correction = policy.get("algorithm.rollout_correction")
    at = "algorithm.rollout_correction"
    if not correction["bypass_mode"] and correction["rollout_is"] is None:
        what = (
            "async_training.replay trains old rows, which need importance weights: without bypass_mode the ratio is to "
            "the trainer's own weights"
        )
        yield Problem(
            policy.key(f"{at}.rollout_is"), what, allowed="token, sequence", fix=f"token, or {at}.bypass_mode=true"
        )
    if queue.max_staleness == 0:
        what = "is above 1, but max_staleness=0 leaves no trained group young enough"
        yield Problem(
            policy.key("async_training.replay.max_uses"), what, queue.replay.max_uses, fix="1, or raise max_staleness"
        )


def queue_problems(policy: PolicyBuilder, queue: QueueSpec, group_size: int) -> Iterable[Problem]:
    """The queue lets as many groups in as training waits for.

    Args:
        policy: the model.
        queue: its queue, with the derived lead.
        group_size: workflows per task.
    """
    batch = batch_groups(policy.tree)
    if not policy.ours["train"]:
        return
    at_least = min(queue.min_batch_groups or batch, batch)
    # Groups trained since the last version count too, and all batches but the last may be full ones.
    needed = groups_per_version(policy.tree) - batch + at_least
    assert queue.max_lead_groups is not None, "derived where it is not given"
    if queue.max_lead_groups < needed:
        given = policy.get("async_training.max_lead_groups") is not None
        name = "max_lead_groups" if given else "staleness_threshold"
        yield Problem(
            policy.key(f"async_training.{name}"),
            f"stops production at {queue.max_lead_groups} groups, but a weight version takes {needed}",
            policy.get(f"async_training.{name}"),
            fix=f">= {needed if given else 0}",
        )
    if queue.max_queue_groups is not None and queue.max_queue_groups < at_least:
        yield Problem(
            policy.key("async_training.max_queue_groups"),
            f"drops groups before the {at_least} of a batch are there",
            queue.max_queue_groups,
            fix=f">= {at_least}" + ("" if queue.min_batch_groups else ", or set min_batch_groups"),
        )
    if queue.max_batch_groups is not None and queue.max_batch_groups < batch:
        yield Problem(
            policy.key("async_training.max_batch_groups"),
            f"is below the {batch} groups that a batch has when they are there",
            queue.max_batch_groups,
            fix=f">= {batch}, or a smaller actor_rollout_ref.actor.ppo_mini_batch_size",
        )
    yield from replay_problems(policy, queue)
    if queue.min_group_size > group_size and queue.on_small_group == "drop":
        yield Problem(
            policy.key("async_training.min_group_size"),
            f"workflow.n={group_size} attempts whose agent makes one call give no group that large",
            queue.min_group_size,
            fix=f"<= {group_size}, or raise workflow.n, or on_small_group=ema",
        )
