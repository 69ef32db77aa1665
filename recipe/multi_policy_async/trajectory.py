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
"""The data that travels from the gateway to the trainers: versions, trajectories, workflow records.

Torch-free, so that the gateway, the ingestor and the workflow driver can import it cheaply.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

NO_VERSION = -1
"""Version number of a token that no engine sampled (mask 0)."""


class Version(NamedTuple):
    """A weight version. The incarnation grows at every restore, since numbers are reused after one."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Parse ``<incarnation>.<number>`` as published by the rollout servers.

        Raises:
            ValueError: the text has another form.
        """
        incarnation, dot, number = text.partition(".")
        if not (dot and incarnation.isdigit() and number.isdigit()):
            raise ValueError(f"weight version {text!r} is not '<incarnation>.<number>'")
        return cls(int(incarnation), int(number))


class VersionSpan(NamedTuple):
    """Oldest and newest version that sampled a token of one call, trajectory or workflow."""

    oldest: Version
    newest: Version


class WorkflowId(NamedTuple):
    """Derived, never random: the same (epoch, task, sample, attempt) always has the same id."""

    epoch: int
    task: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"e{self.epoch}-t{self.task}-s{self.sample}-a{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> "WorkflowId":
        """Inverse of ``str``.

        Raises:
            ValueError: the text has another form.
        """
        parts = text.split("-")
        if [p[:1] for p in parts] != ["e", "t", "s", "a"] or not all(p[1:].isdigit() for p in parts):
            raise ValueError(f"workflow id {text!r} is not 'e<epoch>-t<task>-s<sample>-a<attempt>'")
        return cls(*(int(p[1:]) for p in parts))

    @property
    def task_key(self) -> str:
        """Names the group of all samples of one task in one epoch."""
        return f"e{self.epoch}-t{self.task}"


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One training row of one policy (invariant 1): what an agent's call saw and what the engine sampled.

    ``response_ids`` may hold context between turns; only ids under mask 1 were sampled.
    """

    trajectory_id: str  # "<workflow_id>/<agent_id>/<row>"
    workflow_id: str
    agent_id: str
    model_id: str
    request_id: str
    turn: int
    prompt_ids: np.ndarray  # int32 [P], P >= 1
    response_ids: np.ndarray  # int32 [R], R >= 1
    response_mask: np.ndarray  # uint8 [R], 1 = sampled by the engine
    log_probs: np.ndarray  # float32 [R], 0 under mask 0
    versions: np.ndarray  # int32 [R], version number that sampled the token, NO_VERSION under mask 0
    incarnation: int  # of every version in ``versions``
    finish_reason: str  # "stop" | "length" | "tool_calls"
    reward: float | None = None
    images: tuple[bytes, ...] = ()  # as they were sent, one per run of image placeholders in the ids
    metadata: dict[str, Any] = field(default_factory=dict)  # timings, attempts, overridden sampling, ...

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.log_probs), len(self.versions)}
        if len(lengths) != 1 or 0 in lengths or len(self.prompt_ids) == 0:
            raise ValueError(f"trajectory {self.trajectory_id}: ids, mask, log-probs and versions differ in length")

    @property
    def version_span(self) -> VersionSpan:
        """Oldest and newest version of any sampled token.

        Raises:
            ValueError: the trajectory has no sampled token.
        """
        sampled = self.versions[self.response_mask.astype(bool)]
        if sampled.size == 0:
            raise ValueError(f"trajectory {self.trajectory_id} has no sampled token")
        return VersionSpan(Version(self.incarnation, int(sampled.min())), Version(self.incarnation, int(sampled.max())))


WORKFLOW_STATUSES = ("ok", "failed", "aborted", "no_calls")


@dataclass(frozen=True, kw_only=True)
class WorkflowRecord:
    """The one terminal record of a workflow (invariant 4), with its rows for all models."""

    workflow_id: str
    status: str  # one of WORKFLOW_STATUSES
    trajectories: tuple[Trajectory, ...] = ()
    score: float | None = None  # the team's reward, for metrics
    error: str | None = None
    started_at: float = 0.0  # unix seconds
    ended_at: float = 0.0
    version_vector: dict[str, VersionSpan] = field(default_factory=dict)  # model id -> span over the workflow

    def __post_init__(self) -> None:
        if self.status not in WORKFLOW_STATUSES:
            raise ValueError(f"workflow {self.workflow_id}: status {self.status!r} is not one of {WORKFLOW_STATUSES}")
