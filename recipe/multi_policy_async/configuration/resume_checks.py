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
"""What must not change between a run and its resumption: what its checkpoints, its waiting rows and its task numbers
depend on. Everything else may: learning rates, bounds, lengths, the stop, the cadence of checkpoints."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import Problem
from .overlay import get
from .schema import JobSpec

_JOB = ("device", "run.name", "agent_model_mapping", "workflow.name", "workflow.kwargs")
_DATA = ("data.prompt_key", "data.shuffle", "data.train_max_samples", "data.custom_cls")

_ROLLOUT = "actor_rollout_ref.rollout"
_ROWS = tuple(f"{_ROLLOUT}.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
"""The trainer scales a whole batch by one temperature, so rows that wait were sampled as they will be trained."""

_FILES = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.checkpoint",
    "actor_rollout_ref.actor.optim.optimizer",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.override_config",
)
"""What verl's checkpoint files are made of."""

Tree = Mapping[str, Any]


def changed_settings(job: JobSpec, digests: Tree, config_dir: Path) -> Iterator[Problem]:
    """One problem for every setting that differs from the run's and must not.

    Args:
        job: the job that wants to go on.
        digests: of its training files.
        config_dir: what the run wrote about itself.
    """
    try:
        former_job, former_trees, former_digests = _read(config_dir)
        former = _identity(former_job, former_trees, former_digests)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        yield Problem("run.dir", f"cannot be read: {error}", str(config_dir))
        return
    dumped = job.model_dump(mode="json")
    trees = {model_id: policy.verl for model_id, policy in job.models.items()}
    asked = _identity(dumped, trees, digests)
    if asked["multi_model.models"] != former["multi_model.models"]:
        yield _problem("multi_model.models", asked, former)
    for key in asked.keys() & former.keys() - {"multi_model.models"}:  # of models that both have
        if asked[key] != former[key]:
            yield _problem(key, asked, former)
    for model_id in job.trained.keys() & former_trees.keys():
        yield from _budget_problems(model_id, trees[model_id], former_trees[model_id])


def _budget_problems(model_id: str, tree: Tree, former: Tree) -> Iterator[Problem]:
    """Rows that wait may be as long as they could be when they were sampled, and must fit a micro batch: verl asserts
    it in the step, and the job would end there as often as it went on (utils/seqlen_balancing.py)."""
    actor = "actor_rollout_ref.actor"
    budget = get(tree, f"{actor}.ppo_max_token_len_per_gpu")
    longest = sum(get(former, f"data.max_{side}_length") for side in ("prompt", "response"))
    if get(tree, f"{actor}.use_dynamic_bsz") and budget < longest:
        key = f"multi_model.models.{model_id}.{actor}.ppo_max_token_len_per_gpu"
        what = f"rows of the run that is to go on may have {longest} tokens"
        yield Problem(key, what, budget, fix=f"at least {longest}, or start anew")


def _problem(key: str, asked: Tree, former: Tree) -> Problem:
    return Problem(key, f"is {former[key]!r} in the run that is to go on", asked[key], fix="set it so, or start anew")


def _read(config_dir: Path) -> tuple[Tree, dict[str, Tree], Tree]:
    """What the run wrote about itself: its job, its models' verl trees, and the digests of its training files."""
    job = _load(config_dir / "job.yaml")
    trees = {model_id: _load(config_dir / f"{model_id}.yaml") for model_id in job["models"]}
    return job, trees, json.loads((config_dir / "data.json").read_text())


def _load(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times faster


def _identity(job: Tree, trees: Mapping[str, Tree], digests: Tree) -> dict[str, Any]:
    """Settings by the key that a user writes."""
    values = {key: get(job, key) for key in (*_JOB, *_DATA)}
    values["data.seed"] = job["run"]["seed"] if job["data"]["seed"] is None else job["data"]["seed"]
    values["data.train_files"] = list(digests.values())  # the contents: files may move
    values["multi_model.models"] = sorted(job["models"])
    for model_id, policy in job["models"].items():
        at, tree = f"multi_model.models.{model_id}", trees[model_id]
        values |= {f"{at}.{key}": policy[key] for key in ("model_path", "train")}
        if not policy["train"]:
            continue
        values[f"{at}.trainer.n_gpus"] = policy["trainer_gpus"]  # a file per rank
        values[f"{at}.async_training.group_by"] = policy["queue"]["group_by"]
        has_critic = get(tree, "critic.enable") or get(tree, "algorithm.adv_estimator") == "gae"
        values[f"{at}.critic.enable"] = bool(has_critic)
        values |= {f"{at}.{key}": get(tree, key) for key in (*_FILES, *_ROWS)}
    return values
