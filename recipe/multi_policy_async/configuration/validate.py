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
"""Checks that need more than one key, or more than a type: all problems are collected, none raised."""

import copy
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..gateway.spec import ConcurrencySpec, GatewaySpec
from ..workflows.loader import load_workflow_class
from ..workflows.scoring import load_reward_function
from ..workflows.spec import ValidationSpec, WorkflowSpec
from .errors import Problem, did_you_mean
from .policy import PolicyBuilder
from .schema import AGENT_ID, MODEL_ID, RewardFunctionSpec
from .training_checks import (
    correction_problems,
    estimator_problems,
    image_problems,
    loss_problems,
    micro_batch_problems,
    shuffle_problems,
)

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

JOB_METRICS = ("steps", "pipeline", "validation")
"""Files of the job beside those of the models."""

HTTP_ROLLOUTS = ("hf", "sglang")
"""Rollout servers with SGLang's HTTP interface."""

_DRIVER_SLACK_S = 60.0
"""For a workflow that lets go late, its reward and its finalize."""


def spec_or_problems(cls: type[BaseModel], data: Any, at: str) -> tuple[BaseModel | None, list[Problem]]:
    """Validate one section, with unknown keys and wrong values as problems instead of an exception.

    With nothing wrong but unknown keys the spec comes back too, so that checks which need it still run.
    """
    if not isinstance(data, dict):
        return None, [Problem(at, "must be a section", data)]
    try:
        return cls.model_validate(data), []
    except ValidationError as error:
        problems = [_from_pydantic(cls, detail, at) for detail in error.errors()]
        extras = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
    known = copy.deepcopy(data)
    for *nodes, key in extras:
        section = known
        for node in nodes:
            section = section[node]
        del section[key]
    spec = spec_or_problems(cls, known, at)[0] if extras else None
    return spec, problems


def _from_pydantic(cls: type[BaseModel], detail: Any, at: str) -> Problem:
    location = [str(part) for part in detail["loc"]]
    key = ".".join([at, *location])
    if detail["type"] == "extra_forbidden":
        known = _fields_at(cls, location[:-1])
        fix = did_you_mean(location[-1], known)
        return Problem(key, "unknown key", allowed=None if fix else ", ".join(sorted(known)), fix=fix)
    if detail["type"] == "missing":
        return Problem(key, "is missing")
    return Problem(key, detail["msg"][0].lower() + detail["msg"][1:], detail["input"])


def _fields_at(cls: type[BaseModel], location: list[str]) -> Iterable[str]:
    for part in location:
        field = cls.model_fields.get(part)
        nested = [a for a in _members(field.annotation) if _is_model(a)] if field else []
        if not nested:
            return ()
        cls = nested[0]
    return cls.model_fields


def _members(annotation: Any) -> Iterable[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def id_problems(models: Iterable[str], at: str = "multi_model.models") -> list[Problem]:
    """Model ids become parts of actor names, folders, files and metric prefixes."""
    return [
        Problem(at, "is not a model id", model, allowed=MODEL_ID.strip("^$"))
        for model in models
        if not re.match(MODEL_ID, str(model))
    ] + [Problem(at, "is the name of a file in metrics/", model) for model in models if model in JOB_METRICS]


def mapping_problems(mapping: Any, models: Iterable[str], allow_unused: bool) -> list[Problem]:
    """Every agent has a known model, and every model an agent (unless that is allowed)."""
    models = sorted(models)
    if not isinstance(mapping, dict) or not mapping:
        return [Problem("agent_model_mapping", "must map at least one agent to a model", mapping)]
    problems = []
    for agent, model in mapping.items():
        key = f"agent_model_mapping.{agent}"
        if not re.match(AGENT_ID, str(agent)):
            problems.append(Problem(key, "is not an agent id", allowed=AGENT_ID.strip("^$")))
        if model is None or model == "":
            problems.append(Problem(key, "is mapped to nothing", model, allowed=", ".join(models)))
        elif model not in models:
            fix = did_you_mean(str(model), models)
            problems.append(Problem(key, "names no model of this job", model, allowed=", ".join(models), fix=fix))
    if not allow_unused:
        used = list(mapping.values())  # of any type: wrong ones are problems above
        problems += [
            Problem(
                f"multi_model.models.{model}",
                "no agent uses it",
                fix="map an agent to it, or multi_model.allow_unused=true",
            )
            for model in models
            if model not in used
        ]
    return problems


def workflow_problems(workflow: WorkflowSpec, mapping: Any) -> list[Problem]:
    """The workflow class can be loaded; its agents (attribute ``agents``), and those of ``team_share``, are mapped."""
    try:
        agents = getattr(load_workflow_class(workflow.name, workflow.path), "agents", ())
    except (ValueError, ImportError) as error:
        return [Problem("workflow.name", f"cannot be loaded: {error}", workflow.name)]
    known = sorted(map(str, mapping)) if isinstance(mapping, dict) else []
    if not known:
        return []  # an empty mapping is a problem of its own
    unmapped = [
        Problem(
            f"agent_model_mapping.{agent}",
            f"the workflow calls this agent, but no model is mapped to it (mapped: {', '.join(known)})",
            fix=did_you_mean(agent, known) or f"agent_model_mapping.{agent}=<model id>",
        )
        for agent in agents
        if agent not in known
    ]
    shares = workflow.team_share if isinstance(workflow.team_share, dict) else {}
    return unmapped + [
        Problem(
            f"workflow.team_share.{agent}",
            "is of no agent of this job",
            allowed=", ".join(known),
            fix=did_you_mean(agent, known),
        )
        for agent in shares
        if agent not in known
    ]


def reward_problems(function: RewardFunctionSpec) -> list[Problem]:
    """The reward function can be loaded."""
    if function.path is None:
        return []
    try:
        load_reward_function(function.path, function.name, function.reward_kwargs)
    except (ValueError, ImportError) as error:
        return [Problem("reward.custom_reward_function", f"cannot be loaded: {error}", function.path)]
    return []


def validation_problems(validation: ValidationSpec, data: Any) -> list[Problem]:
    """There is something to evaluate on."""
    if not validation.enabled or data.val_files:
        return []
    asked = [key for key in ("every_updates", "before_training", "at_end") if getattr(validation, key)]
    what = f"is empty, but validation.{asked[0]} asks for an evaluation"
    return [Problem("data.val_files", what, fix="name a file of tasks that are not trained on")]


def idle_problems(gateway: GatewaySpec, workflow: WorkflowSpec) -> list[Problem]:
    """The driver's deadline comes before the gateway's own: it waits for a thread up to the deadline, then plays."""
    needed = 2 * workflow.timeout_s + _DRIVER_SLACK_S
    if gateway.workflow_idle_s is None or gateway.workflow_idle_s >= needed:
        return []
    return [
        Problem(
            "gateway.workflow_idle_s",
            f"would abort workflows that the driver still runs (workflow.timeout_s={workflow.timeout_s:g})",
            gateway.workflow_idle_s,
            allowed=f"{needed:g} (2 * workflow.timeout_s + {_DRIVER_SLACK_S:g}) or more, or null",
            fix=f"gateway.workflow_idle_s={needed:g}",
        )
    ]


def stop_problems(stop: Any) -> list[Problem]:
    """The limit that ``stop.by`` names is set; the other two do not count."""
    key = {"updates": "updates", "tasks": "tasks", "time": "seconds"}[stop.by]
    if getattr(stop, key) is not None:
        return []
    return [Problem(f"stop.{key}", f"is needed by stop.by={stop.by}", fix=f"set stop.{key}")]


def policy_problems(policy: PolicyBuilder, device: str, stop_by: str, group_size: int) -> list[Problem]:
    """What verl would only find out in a worker, or not at all."""
    checks = (_path, _sampling, _lengths, _replicas, _unsupported, _batches, _schedule)
    found = [problem for check in checks for problem in check(policy, device, stop_by, group_size)]
    return found


def upstream_problems(policy: PolicyBuilder, upstream: str) -> Iterable[Problem]:
    """The gateway can talk to the model's rollout servers."""
    name = policy.get("actor_rollout_ref.rollout.name")
    if upstream == "sglang_router" and name not in HTTP_ROLLOUTS:
        yield Problem(
            policy.key("actor_rollout_ref.rollout.name"),
            "does not speak SGLang's HTTP interface, which gateway.upstream=sglang_router needs",
            name,
            allowed=", ".join(HTTP_ROLLOUTS),
            fix="gateway.upstream=verl_client",
        )


def concurrency_problems(
    policy: PolicyBuilder, concurrency: ConcurrencySpec, gateway: dict[str, Any]
) -> Iterable[Problem]:
    """An adaptive limit can see the load of the servers that it follows."""
    if concurrency.adaptive and gateway["upstream"] != "sglang_router":
        key = policy.key("async_training.concurrency.adaptive")
        yield Problem(key, "asks the servers for their load, which verl's client cannot", True, fix="false")


def _path(policy: PolicyBuilder, device: str, *_: Any) -> Iterable[Problem]:
    path = policy.ours["model_path"]
    key = policy.key("model_path")
    if not isinstance(path, str) or not path:
        yield Problem(
            key, "is missing", path, fix="a local folder" + ("" if device == "cpu" else ", or a hub id like org/name")
        )
    elif Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            yield Problem(key, "holds no config.json", path, fix="a folder written by save_pretrained")
    elif device == "cpu" or not HUB_ID.match(path):
        fix = "python -m recipe.multi_policy_async.assets.prepare_models writes the small ones"
        yield Problem(key, "does not exist", path, allowed="a local folder" if device == "cpu" else None, fix=fix)


def _sampling(policy: PolicyBuilder, *_: Any) -> Iterable[Problem]:
    at = "actor_rollout_ref.rollout"
    temperature, top_p, top_k = (policy.get(f"{at}.{name}") for name in ("temperature", "top_p", "top_k"))
    if policy.ours["train"] and not temperature > 0:
        yield Problem(policy.key(f"{at}.temperature"), "a policy in training samples, so > 0", temperature)
    if not 0 < top_p <= 1:
        yield Problem(policy.key(f"{at}.top_p"), "must be in (0, 1]", top_p)
    if top_k != -1 and top_k < 1:
        yield Problem(policy.key(f"{at}.top_k"), "must be -1 (off) or >= 1", top_k)


def _lengths(policy: PolicyBuilder, *_: Any) -> Iterable[Problem]:
    prompt, response = (policy.get(f"data.max_{side}_length") for side in ("prompt", "response"))
    context = policy.get("actor_rollout_ref.rollout.max_model_len")
    if context < prompt + 1:
        key = policy.key("actor_rollout_ref.rollout.max_model_len")
        yield Problem(key, f"leaves no room for an answer after data.max_prompt_length={prompt}", context)
    budget = policy.get("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    if policy.get("actor_rollout_ref.actor.use_dynamic_bsz") and budget < prompt + response:
        key = policy.key("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
        yield Problem(key, f"one row may have {prompt + response} tokens", budget, fix=f"at least {prompt + response}")


def _replicas(policy: PolicyBuilder, *_: Any) -> Iterable[Problem]:
    size, count = gpus_per_replica(policy.tree), policy.ours["rollout_gpus"]
    if count % size:
        yield Problem(policy.key("rollout.n_gpus"), f"is not a multiple of the {size} GPUs of one replica", count)


def gpus_per_replica(tree: dict[str, Any]) -> int:
    """Ranks of one rollout replica (verl/workers/rollout/replica.py, world_size)."""
    rollout = tree["actor_rollout_ref"]["rollout"]
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    product = 1
    for size in sizes:
        product *= int(rollout[size])
    return product


_REFUSED = {
    "async_training.use_trainer_do_validate": "evaluation plays whole workflows: set validation.every_updates",
    "async_training.use_dynamic_resource_scheduling": "trainer GPUs are never lent to rollout",
    "algorithm.use_pf_ppo": "it draws rows anew, padding among them",
    "algorithm.filter_groups.enable": "groups are filtered where they close: set async_training.filter_equal_rewards",
    "reward.reward_model.enable": "rewards come from the workflow",
    "reward.custom_reward_function.path": "the whole team is judged: set the job's own reward.custom_reward_function",
    "distillation.enabled": "there is no teacher in this recipe",
    "transfer_queue.enable": "the ingestor's queues carry the data",
    "actor_rollout_ref.rollout.disaggregation.enabled": "one router per model balances whole replicas",
}


def _unsupported(policy: PolicyBuilder, device: str, *_: Any) -> Iterable[Problem]:
    for key, reason in _REFUSED.items():
        if policy.get(key):
            yield Problem(policy.key(key), f"is not supported: {reason}", policy.get(key))
    strategy = policy.get("actor_rollout_ref.actor.strategy")
    allowed = ("fsdp2",) if device == "cpu" else ("fsdp", "fsdp2")
    if strategy not in allowed:
        key = policy.key("actor_rollout_ref.actor.strategy")
        yield Problem(key, f"is not supported on device={device}", strategy, allowed=", ".join(allowed))
    if device == "cpu" and (policy.get("critic.enable") or policy.get("algorithm.adv_estimator") == "gae"):
        key = policy.key("algorithm.adv_estimator")
        yield Problem(key, "the CPU backend has no critic", policy.get("algorithm.adv_estimator"), fix="grpo")


def _batches(policy: PolicyBuilder, device: str, stop_by: str, group_size: int) -> Iterable[Problem]:
    if not policy.ours["train"]:
        return
    yield from estimator_problems(policy, group_size)
    yield from image_problems(policy)
    yield from micro_batch_problems(policy)
    yield from loss_problems(policy)
    yield from correction_problems(policy)
    yield from shuffle_problems(policy)


def _schedule(policy: PolicyBuilder, device: str, stop_by: str, *_: Any) -> Iterable[Problem]:
    if stop_by == "updates" or not policy.ours["train"]:
        return
    at = "actor_rollout_ref.actor.optim"
    optimizer = policy.get(at)
    if optimizer["total_training_steps"] > 0:
        return
    fix = "stop.by=updates, or set total_training_steps"
    if optimizer["lr_scheduler_type"] != "constant":
        yield Problem(
            policy.key(f"{at}.lr_scheduler_type"),
            "decays over an unknown horizon",
            optimizer["lr_scheduler_type"],
            fix=fix,
        )
    if optimizer["lr_warmup_steps_ratio"] > 0:
        yield Problem(
            policy.key(f"{at}.lr_warmup_steps_ratio"),
            "is a share of an unknown horizon",
            optimizer["lr_warmup_steps_ratio"],
            fix=fix,
        )
