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
"""Compose a job with Hydra and check all of it: ``compose_job(config_name, overrides) -> JobSpec``.

Torch, verl and Ray are not imported; it takes about a second, most of it Hydra's.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..gateway.spec import ConcurrencySpec, GatewaySpec
from ..ingest.spec import IngestSpec, QueueSpec
from ..workflows.spec import ValidationSpec, WorkflowSpec
from . import schema, training_checks, validate
from .errors import ConfigError, Problem, did_you_mean
from .overlay import get
from .policy import SHORT_KEYS, JobContext, PolicyBuilder
from .verl_tree import verl_defaults

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
DEFAULT_CONFIG = "multi_policy_trainer"

GROUPS = ("device", "gateway", "ingest", "queue", "concurrency", "workflow", "validation")

_SECTIONS = {
    "run": schema.RunSpec,
    "gateway": GatewaySpec,
    "workflow": WorkflowSpec,
    "validation": ValidationSpec,
    "ingest": IngestSpec,
    "queue": QueueSpec,
    "concurrency": ConcurrencySpec,
    "data": schema.DataSpec,
    "reward": schema.RewardSpec,
    "stop": schema.StopSpec,
    "checkpoint": schema.CheckpointSpec,
    "metrics": schema.MetricsSpec,
    "supervision": schema.SupervisionSpec,
    "ray_kwargs": schema.RaySpec,
}
_OTHER_KEYS = ("device", "multi_model", "policy_defaults", "agent_model_mapping")
_MULTI_MODEL_KEYS = ("enable", "allow_unused", "models")


@dataclass
class RawJob:
    """A composed job tree before it is checked: the job's own sections resolved, the verl overlays not."""

    job: dict[str, Any]
    device: str
    overlay: dict[str, Any]
    policy_defaults: dict[str, Any]
    models: Any
    set_on_command_line: frozenset[str]


def compose_job(
    config_name: str = DEFAULT_CONFIG, overrides: list[str] | None = None, config_dir: Path | None = None
) -> schema.JobSpec:
    """Compose and check a job.

    Args:
        config_name: file in ``config_dir`` or in the recipe's own ``config``, without ``.yaml``.
        overrides: Hydra overrides; ``key=value`` also adds keys, since unknown ones are refused here anyway.
        config_dir: folder of the user's own compositions.

    Raises:
        ConfigError: names every problem found.
    """
    return build_job(compose_raw(config_name, overrides or [], config_dir))


def compose_raw(config_name: str, overrides: list[str], config_dir: Path | None = None) -> RawJob:
    """Run Hydra. Raises ConfigError where Hydra refuses."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        lines = [_permissive(override) for override in parsed]
        if config_dir is not None:
            lines.append(f"hydra.searchpath=[file://{CONFIG_DIR}]")
        GlobalHydra.instance().clear()
        with initialize_config_dir(
            str((config_dir or CONFIG_DIR).resolve()), version_base=None, job_name="multi_policy"
        ):
            composed = compose(config_name.removesuffix(".yaml"), overrides=lines, return_hydra_config=True)
        device = composed.hydra.runtime.choices.get("device")
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        return _split(composed, str(device), parsed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([Problem("configuration", _first_lines(error))]) from error


def _first_lines(error: Exception) -> str:
    """Hydra's message without its search path."""
    return " ".join(str(error).partition("Config search path")[0].split())


def _permissive(override: Override) -> str:
    """Plain assignments may add keys: our own check knows the allowed ones and lists all errors at once."""
    if override.is_add() or override.is_delete() or override.key_or_group.startswith("hydra."):
        return override.input_line
    if override.key_or_group in GROUPS and isinstance(override.value(), str):
        return override.input_line
    return "++" + override.input_line.lstrip("+")


def _split(composed: Any, device: str, overrides: list[Override]) -> RawJob:
    raw = OmegaConf.to_container(composed, resolve=False)
    overlay, policy_defaults = raw.pop("device", None) or {}, raw.pop("policy_defaults", None) or {}
    multi_model = raw.get("multi_model")
    models = multi_model.pop("models", None) if isinstance(multi_model, dict) else None
    job = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    return RawJob(job, device, overlay, policy_defaults, models, frozenset(o.key_or_group for o in overrides))


def build_job(raw: RawJob) -> schema.JobSpec:
    """Check a composed job and build its spec.

    Raises:
        ConfigError: names every problem found.
    """
    raw = copy.deepcopy(raw)
    problems = _top_level_problems(raw)
    models, found = normalise_models(raw.models)
    problems += found
    specs: dict[str, Any] = {}
    for name, cls in _SECTIONS.items():
        data = raw.job.get(name)
        if name == "run" and isinstance(data, dict) and data.get("dir"):
            data["dir"] = str(Path(str(data["dir"])).expanduser().resolve())
        if name == "data" and isinstance(data, dict):
            data.update({key: _files(data.get(key)) for key in ("train_files", "val_files")})
        specs[name], found = validate.spec_or_problems(cls, data, name)
        problems += found
    mapping = raw.job.get("agent_model_mapping")
    allow_unused = get(raw.job, "multi_model.allow_unused")
    problems += validate.mapping_problems(mapping, models, bool(allow_unused))
    if specs["stop"] is not None:
        problems += validate.stop_problems(specs["stop"])
    if specs["data"] is not None:
        problems += _file_problems(specs["data"])
    if specs["reward"] is not None:
        problems += validate.reward_problems(specs["reward"].custom_reward_function)
    if specs["data"] is not None and specs["validation"] is not None:
        problems += validate.validation_problems(specs["validation"], specs["data"])
    if specs["workflow"] is not None:
        problems += validate.workflow_problems(specs["workflow"], mapping)
        if specs["gateway"] is not None:
            problems += validate.idle_problems(specs["gateway"], specs["workflow"])
    broken = [name for name in specs if specs[name] is None]
    if broken:  # the policies are checked all the same, against sections that are right
        raw.job.update({name: compose_raw(DEFAULT_CONFIG, []).job[name] for name in broken})
    context = JobContext(raw.job, raw.device, raw.overlay, raw.policy_defaults)
    policies, found = _policies(models, context, raw.set_on_command_line)
    problems += found
    if problems:
        raise ConfigError({str(problem): problem for problem in problems}.values())  # shared layers repeat theirs
    del specs["queue"], specs["concurrency"]  # every policy has its own by now
    return schema.JobSpec(device=raw.device, models=policies, agent_model_mapping=mapping, **specs)


def _top_level_problems(raw: RawJob) -> list[Problem]:
    known = (*_SECTIONS, *_OTHER_KEYS)
    problems = [Problem(key, "unknown key", fix=did_you_mean(key, known)) for key in raw.job if key not in known]
    multi_model = raw.job.get("multi_model")
    if not isinstance(multi_model, dict):
        problems.append(Problem("multi_model", "must be a section", multi_model))
    else:
        for key in multi_model:
            if key not in _MULTI_MODEL_KEYS:
                fix = did_you_mean(key, _MULTI_MODEL_KEYS)
                problems.append(Problem(f"multi_model.{key}", "unknown key", fix=fix))
        if multi_model.get("enable") is not True:
            problems.append(Problem("multi_model.enable", "must be true", multi_model.get("enable")))
        if not isinstance(allow_unused := multi_model.get("allow_unused", False), bool):
            problems.append(Problem("multi_model.allow_unused", "must be true or false", allow_unused))
    return problems


def normalise_models(models: Any) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """The models keyed by id. The RFC's list form is accepted; duplicates and bad ids are problems."""
    at = "multi_model.models"
    problems: list[Problem] = []
    keyed: dict[str, dict[str, Any]] = {}
    models = {} if models is None else models
    if isinstance(models, list):
        entries = []
        for position, section in enumerate(models):
            if not isinstance(section, dict) or "model_id" not in section:
                problems.append(Problem(f"{at}[{position}]", "has no model_id", section))
                continue
            rest = {key: value for key, value in section.items() if key != "model_id"}
            entries.append((str(section["model_id"]), rest))
    elif isinstance(models, dict):
        # null takes a model of the composition below out again
        entries = [(str(model_id), section) for model_id, section in models.items() if section is not None]
    else:
        return {}, [Problem(at, "must be a map keyed by model id, or a list", models)]
    for model_id, section in entries:
        if model_id in keyed:
            problems.append(Problem(at, f"the id {model_id!r} is given twice", fix="rename one"))
        if not isinstance(section, dict):
            problems.append(Problem(f"{at}.{model_id}", "must be a section", section))
            section = {}
        named = section.pop("model_id", model_id)
        if named != model_id:
            problems.append(Problem(f"{at}.{model_id}.model_id", "differs from its key", named, fix="leave it out"))
        keyed[model_id] = section
    if not entries and not problems:
        problems.append(Problem(at, "is empty", fix="name at least one model"))
    return keyed, problems + validate.id_problems(keyed)


def _policies(
    models: dict[str, dict[str, Any]], context: JobContext, on_command_line: frozenset[str]
) -> tuple[dict[str, schema.PolicySpec], list[Problem]]:
    problems: list[Problem] = []
    policies: dict[str, schema.PolicySpec] = {}
    trained = []
    stop, group_size = context.job["stop"], context.job["workflow"]["n"]
    for index, (model_id, section) in enumerate(models.items()):
        builder = PolicyBuilder(model_id, index, section, context)
        builder.build()
        if builder.tree:
            builder.problems += validate.policy_problems(builder, context.device, stop["by"], group_size)
            builder.problems += validate.upstream_problems(builder, context.job["gateway"]["upstream"])
            queue, found = validate.spec_or_problems(QueueSpec, queue_settings(builder), builder.key("async_training"))
            builder.problems += found or training_checks.queue_problems(builder, queue, group_size)
            if queue is not None:
                builder.problems += training_checks.group_problems(builder, queue, context.job["gateway"]["rows"])
            at = "async_training.concurrency"
            concurrency, found = validate.spec_or_problems(ConcurrencySpec, builder.get(at), builder.key(at))
            builder.problems += found or validate.concurrency_problems(builder, concurrency, context.job["gateway"])
        problems += builder.problems
        trained.append(builder.ours.get("train") is not False)
        if not builder.problems:
            policies[model_id] = schema.PolicySpec(
                model_id=model_id,
                model_path=builder.ours["model_path"],
                train=trained[-1],
                trainer_gpus=builder.ours["trainer_gpus"],
                rollout_gpus=builder.ours["rollout_gpus"],
                gpus_per_replica=validate.gpus_per_replica(builder.tree),
                target_updates=stop["updates"] if trained[-1] and stop["by"] == "updates" else None,
                namespace=builder.namespace,
                replica_rank_offset=builder.replica_rank_offset,
                master_port_range=builder.master_port_range(),
                queue=queue,
                concurrency=concurrency,
                verl=builder.tree,
                origin=_origins(builder, on_command_line),
            )
    if trained and not any(trained):
        fix = "train=true for at least one"
        problems.append(Problem("multi_model.models", "are all frozen (train: false): nothing to train", fix=fix))
    return policies, problems


def queue_settings(policy: PolicyBuilder) -> dict[str, Any]:
    """The queue's settings, which stand in ``async_training`` beside verl's.

    The lead is verl's where none is given (``fully_async_rollouter.py``, ``set_max_required_samples``).
    """
    settings = {name: policy.get(f"async_training.{name}") for name in QueueSpec.model_fields}
    if settings["max_lead_groups"] is None:
        lead = training_checks.groups_per_version(policy.tree) * (1 + policy.get("async_training.staleness_threshold"))
        settings["max_lead_groups"] = max(1, int(lead))
    return settings


_GROUP_KEYS = {"queue": "async_training.", "concurrency": "async_training.concurrency."}
"""Config groups whose keys stand in a model's ``async_training``, and where."""


def _origins(policy: PolicyBuilder, on_command_line: frozenset[str]) -> dict[str, str]:
    """Layer per key whose value is not verl's, with what was typed told apart from what files say."""
    defaults = verl_defaults()
    prefixes = {"policy_defaults": "policy_defaults", f"models.{policy.model_id}": policy.key()}
    prefixes |= {group: group for group in _GROUP_KEYS}
    origin = {}
    for dotted, layer in policy.origin.items():
        if policy.get(dotted) == get(defaults, dotted) and dotted not in SHORT_KEYS:
            continue
        written = f"{prefixes[layer]}.{dotted.removeprefix(_GROUP_KEYS.get(layer, ''))}" if layer in prefixes else ""
        typed = any(written == key or written.startswith(f"{key}.") for key in on_command_line)
        origin[dotted] = f"{layer} (command line)" if typed else layer
    return origin


def _files(value: Any) -> Any:
    """Absolute paths; what is no list is left to the check of the section."""
    files = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(files, list):
        return value
    return [str(Path(str(file)).expanduser().resolve()) for file in files]


def _file_problems(data: schema.DataSpec) -> list[Problem]:
    fix = "python -m recipe.multi_policy_async.assets.prepare_tasks writes one"
    problems = [
        Problem(f"data.{key}", "does not exist", str(file), fix=fix)
        for key in ("train_files", "val_files")
        for file in getattr(data, key)
        if not file.is_file()
    ]
    if not data.train_files:
        problems.append(Problem("data.train_files", "is empty", fix=fix))
    return problems
