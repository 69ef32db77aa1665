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
"""Types and bounds of a job's configuration. Defaults live in ``config/`` only.

``JobSpec`` is what every part is built from: complete, resolved, picklable, and importable without torch, verl or Ray.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from ..gateway.spec import ConcurrencySpec, GatewaySpec
from ..ingest.spec import IngestSpec, QueueSpec
from ..workflows.spec import ValidationSpec, WorkflowSpec

MODEL_ID = r"^[a-z0-9][a-z0-9_-]*$"
AGENT_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"

Seconds = Annotated[float, Field(gt=0)]


class Spec(BaseModel):
    """Base of all specs: unknown keys fail, values never change, lax coercions of pydantic are off."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class RunSpec(Spec):
    """Where and how the job runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    dir: Path  # absolute; everything the job writes lies below it
    resume: Literal[False, True, "auto"]  # go on with the run that ``dir`` holds; auto: if it holds one
    resume_at: dict[str, Annotated[int, Field(ge=0)]]  # model id -> version instead of its newest checkpoint
    seed: int
    gpus_per_node: Annotated[int, Field(ge=1)]  # how a policy's n_gpus is dealt over nodes
    master_port_range: tuple[int, int]  # torch rendezvous ports, dealt to the policies in disjoint slices


class StopSpec(Spec):
    """When the job is done. Only the limit that ``by`` names counts."""

    by: Literal["updates", "tasks", "time"]
    updates: Annotated[int, Field(ge=1)] | None  # weight versions of every trained policy
    tasks: Annotated[int, Field(ge=1)] | None  # dataset rows started
    seconds: Seconds | None


class CustomClassSpec(Spec):
    """A user's dataset class, as verl loads it."""

    path: str | None
    name: str | None


class DataSpec(Spec):
    """The task dataset, with the names of verl's ``data`` section."""

    train_files: tuple[Path, ...]
    val_files: tuple[Path, ...]
    prompt_key: str
    shuffle: bool
    seed: int | None  # null: run.seed
    train_max_samples: Annotated[int, Field(ge=-1)]  # -1: all
    val_max_samples: Annotated[int, Field(ge=-1)]
    custom_cls: CustomClassSpec


class RewardFunctionSpec(Spec):
    """A user's reward function, with verl's keys (``verl/trainer/config/reward/reward.yaml``)."""

    path: str | None  # a .py file or pkg://module; null: the verifier of the task's data_source
    name: str
    reward_kwargs: dict[str, Any]


class RewardSpec(Spec):
    """The part of verl's ``reward`` section that the workflow driver reads."""

    custom_reward_function: RewardFunctionSpec


class MetricsSpec(Spec):
    """What a person and the tracking backends see."""

    backends: tuple[str, ...]  # of verl's Tracking
    pipeline_interval_s: Seconds


class SupervisionSpec(Spec):
    """Deadlines per phase; a part that passes one is declared dead (invariant 8). What then happens to a policy."""

    startup_s: Seconds
    step_s: Seconds
    sync_s: Seconds
    save_s: Seconds
    shutdown_s: Seconds
    restarts: Annotated[int, Field(ge=0)]  # of each policy


class CheckpointSpec(Spec):
    """When policies are saved; saves happen at version boundaries only."""

    every_updates: Annotated[int, Field(ge=0)]  # 0: never on the way
    at_end: bool
    keep: Annotated[int, Field(ge=1)] | None  # newest ones of each policy; null: all


class RaySpec(Spec):
    """Keyword arguments of ``ray.init``; null in num_cpus and num_gpus means what the job needs."""

    ray_init: dict[str, Any]


class PolicySpec(Spec):
    """One policy, with its full verl configuration."""

    model_id: Annotated[str, Field(pattern=MODEL_ID)]
    model_path: str
    train: bool  # false: served, never trained
    trainer_gpus: Annotated[int, Field(ge=0)]  # logical ones on a CPU machine
    rollout_gpus: Annotated[int, Field(ge=1)]
    gpus_per_replica: Annotated[int, Field(ge=1)]
    target_updates: Annotated[int, Field(ge=1)] | None  # the policy retires there; null: never
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]  # prefix of cluster-wide names
    replica_rank_offset: Annotated[int, Field(ge=0)]
    master_port_range: tuple[int, int]
    queue: QueueSpec
    concurrency: ConcurrencySpec
    verl: dict[str, Any]  # resolved
    origin: dict[str, str]  # dotted verl key -> layer that set it, for keys that differ from verl's default

    def verl_config(self) -> DictConfig:
        """A fresh copy of the verl tree as verl's classes want it; struct is off, since verl adds keys."""
        return OmegaConf.create(self.verl)

    @property
    def num_replicas(self) -> int:
        return self.rollout_gpus // self.gpus_per_replica


class JobSpec(Spec):
    """One job: the policies, who uses them, and everything around them."""

    device: Literal["cpu", "gpu"]
    run: RunSpec
    models: dict[str, PolicySpec]
    agent_model_mapping: dict[str, str]
    gateway: GatewaySpec
    workflow: WorkflowSpec
    validation: ValidationSpec
    ingest: IngestSpec
    data: DataSpec
    reward: RewardSpec
    stop: StopSpec
    checkpoint: CheckpointSpec
    metrics: MetricsSpec
    supervision: SupervisionSpec
    ray_kwargs: RaySpec

    @property
    def trained(self) -> dict[str, PolicySpec]:
        return {model_id: policy for model_id, policy in self.models.items() if policy.train}
