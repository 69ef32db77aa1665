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
"""What is simulated: one Hydra composition per scenario, checked as a job's is.

The sections ``gateway``, ``workflow``, ``ingest`` and ``queue`` are the job's own, with the job's defaults; what stands
in for engines, trainers and workflows is in ``simulation``, ``policy_defaults`` and ``policies``.
"""

import copy
import json
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..configuration.compose import CONFIG_DIR as JOB_CONFIG_DIR
from ..configuration.errors import ConfigError, Problem, did_you_mean
from ..configuration.validate import spec_or_problems
from ..gateway.spec import GatewaySpec
from ..ingest.spec import IngestSpec, QueueSpec
from ..workflows.spec import WorkflowSpec

CONFIG_DIR = Path(__file__).resolve().parent / "config"
GROUPS = ("gateway", "ingest", "queue", "workflow")


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SimulationSpec(_Spec):
    """How long, and what workflows do besides calling policies."""

    seconds: float = Field(gt=0)
    """Simulated; then no task is started any more, the running ones finish and what is queued is trained."""
    warmup_s: float = Field(ge=0)
    """Not measured at the beginning."""
    seed: int
    tasks: int = Field(ge=1)
    """Size of the dataset; it is played again and again."""
    other_s: float = Field(ge=0)
    """What a workflow spends outside of its models: tools, tests, judges."""
    fail_share: float = Field(ge=0, lt=1)
    """Share of workflows that fail by their own fault at their end."""
    stall_s: float = Field(gt=0)
    """So long without a finished workflow or a trainer that works is a deadlock; longer than a workflow."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> "SimulationSpec":
        if self.warmup_s >= self.seconds:
            raise ValueError(f"warmup_s {self.warmup_s:g} leaves nothing of {self.seconds:g} seconds to measure")
        return self


class ServingSpec(_Spec):
    """Rollout servers of a policy."""

    replicas: int = Field(ge=1)
    slots_per_replica: int = Field(ge=1)
    """Sequences that a replica decodes side by side."""
    token_s: float = Field(gt=0)
    """Seconds per token of one sequence with all slots in use; prefill is part of it."""
    response_tokens: float = Field(ge=1)
    """Mean length of an answer."""
    response_spread: float = Field(ge=0, lt=1)
    """Lengths are uniform in mean * (1 -+ spread)."""


class TrainingSpec(_Spec):
    """The trainer of a policy."""

    ranks: int = Field(ge=1)
    batch_groups: int = Field(ge=1)
    """Advantage groups of a batch (a job: ppo_mini_batch_size * require_batches)."""
    step_s: float = Field(ge=0)
    """Seconds per batch whatever its size."""
    row_s: float = Field(ge=0)
    """Seconds per row on one rank."""
    sync_s: float = Field(ge=0)
    """Seconds of a weight sync, in which the policy's servers stand still."""
    trigger_parameter_sync_step: int = Field(ge=1)
    staleness_threshold: float = Field(ge=0)

    @model_validator(mode="after")
    def _takes_time(self) -> "TrainingSpec":
        if self.step_s == self.row_s == 0:
            raise ValueError("a batch must take time: set step_s or row_s")
        return self


class SimulatedPolicySpec(_Spec):
    """One policy and the agent of the same name that calls it."""

    calls_per_workflow: float = Field(gt=0)
    """Turns of its agent in a workflow, on average; the fraction is a turn that only some have."""
    optional_by: Literal["task", "workflow"]
    """Who has that turn: all workflows of some tasks (hard ones), or some workflows of every task."""
    train: bool
    serving: ServingSpec
    training: TrainingSpec
    queue: QueueSpec


class Scenario(_Spec):
    """Everything that a simulation needs."""

    simulation: SimulationSpec
    gateway: GatewaySpec
    workflow: WorkflowSpec
    ingest: IngestSpec
    policies: dict[str, SimulatedPolicySpec] = Field(min_length=1)


_SECTIONS = {
    "simulation": SimulationSpec,
    "gateway": GatewaySpec,
    "workflow": WorkflowSpec,
    "ingest": IngestSpec,
}


def compose_scenario(config_name: str, overrides: list[str], config_dir: Path | None = None) -> Scenario:
    """Compose and check a scenario.

    Args:
        config_name: file in ``config_dir`` or beside this module in ``config``, without ``.yaml``.
        overrides: Hydra overrides.
        config_dir: folder of the user's own scenarios.

    Raises:
        ConfigError: names every problem found.
    """
    searched = [f"file://{JOB_CONFIG_DIR}", f"file://{CONFIG_DIR}"]
    lines = [_permissive(line) for line in overrides] + [f"hydra.searchpath={json.dumps(searched)}"]
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str((config_dir or CONFIG_DIR).resolve()), version_base=None, job_name="simulate"):
            tree = OmegaConf.to_container(compose(config_name.removesuffix(".yaml"), overrides=lines), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        what = " ".join(str(error).partition("Config search path")[0].split())
        raise ConfigError([Problem("configuration", what)]) from error
    return build_scenario(tree)


def _permissive(override: str) -> str:
    """Assignments may add keys, as in a job: the check below knows the allowed ones."""
    return override if override.startswith(("+", "~")) or override.split("=")[0] in GROUPS else f"++{override}"


def build_scenario(tree: dict[str, Any]) -> Scenario:
    """Check a composed tree.

    Raises:
        ConfigError: names every problem found.
    """
    known = (*_SECTIONS, "queue", "policy_defaults", "policies")
    problems = [Problem(key, "unknown key", fix=did_you_mean(key, known)) for key in tree if key not in known]
    built: dict[str, Any] = {}
    for name, cls in _SECTIONS.items():
        built[name], found = spec_or_problems(cls, tree.get(name), name)
        problems += found
    policies = {name: section for name, section in (tree.get("policies") or {}).items() if section is not None}
    if not policies:
        problems.append(Problem("policies", "is empty", fix="name at least one policy"))
    built["policies"] = {}
    for name, section in policies.items():
        layers = ({"queue": tree.get("queue")}, tree.get("policy_defaults"), section)
        merged = OmegaConf.to_container(OmegaConf.merge(*(copy.deepcopy(layer or {}) for layer in layers)))
        _derive_lead(merged)
        built["policies"][name], found = spec_or_problems(SimulatedPolicySpec, merged, f"policies.{name}")
        problems += found
    if problems:
        raise ConfigError(problems)
    return Scenario(**built)


def _derive_lead(policy: dict[str, Any]) -> None:
    """verl's bound (``fully_async_rollouter.py``, ``set_max_required_samples``), as a job derives it."""
    queue, training = policy.get("queue"), policy.get("training")
    names = ("batch_groups", "trigger_parameter_sync_step", "staleness_threshold")
    if isinstance(queue, dict) and isinstance(training, dict) and queue.get("max_lead_groups") is None:
        numbers = [training.get(name) for name in names]
        if all(isinstance(number, int | float) for number in numbers):
            batch, steps, threshold = numbers
            queue["max_lead_groups"] = max(1, int(batch * steps * (1 + threshold)))
