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
"""The numbers that a simulation, or a real job, leaves, and what bounds each rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ingest.reasons import FAILED_WORKFLOW, GROUP_TOO_SMALL, NON_FINITE, TRUNCATED
from .meters import Samples

if TYPE_CHECKING:  # the numbers of a real job need no simulator
    from .engine import SimulatedEngine
    from .scenario import Scenario
    from .trainer import SimulatedTrainer

TRAINING, SERVING, WORKFLOWS = "training", "serving", "workflows"
SLOTS = "workflow slots"

ENOUGH = 0.9
"""A stage that does this share of what it could is what bounds the others."""

BY_RULE = (FAILED_WORKFLOW, GROUP_TOO_SMALL, NON_FINITE, TRUNCATED)  # rows that no trainer may have


@dataclass(frozen=True)
class PolicyRun:
    """One policy in the measured window. Shares are of its seconds, rates per second."""

    trained: bool
    serving_busy: float  # mean share of its servers' slots in use
    serving_queue: float  # mean requests that wait for a slot
    gate_closed: float  # share
    call_rate: float
    queue_groups: float  # mean
    phases: Mapping[str, float]  # shares of its trainer: wait, train, hold, sync
    trainable_rate: float  # rows that came and that its trainer may have
    trained_rate: float  # rows
    dropped: Mapping[str, int]  # rows by reason
    staleness_mean: float
    staleness_max: float
    version: str

    @property
    def busy(self) -> float:
        """Share in which its trainer trains or syncs."""
        return self.phases.get("train", 0.0) + self.phases.get("sync", 0.0)

    @property
    def bounds(self) -> dict[str, float]:
        """Rows per second that training, serving and the workflows' calls would allow, each taken alone.

        Training: if the trainer never waited for data or held a version. Serving: if no slot was ever free while the
        gate was open. Workflows: the rows that came, which is workflow rate x calls per workflow.
        """
        bounds = {WORKFLOWS: self.trainable_rate}
        if self.busy:
            bounds[TRAINING] = self.trained_rate / self.busy
        if self.serving_busy:
            bounds[SERVING] = self.call_rate * (1 - self.gate_closed) / self.serving_busy
        return bounds

    @property
    def bound_by(self) -> str:
        """The stage with the lowest bound; the servers where they are as good as busy, for they make the supply."""
        lowest = min(self.bounds, key=self.bounds.__getitem__)
        nearly = self.bounds.get(SERVING, float("inf")) <= self.bounds[WORKFLOWS] / ENOUGH
        return SERVING if lowest == WORKFLOWS and nearly else lowest

    @property
    def attained(self) -> float:
        """Trained rows as a share of the lowest bound, i.e. how busy the trainer is beside how busy it could be."""
        lowest = min(self.bounds.values())
        return self.trained_rate / lowest if lowest else 0.0


@dataclass(frozen=True)
class Flow:
    """What passed through all stages in the measured time."""

    seconds: float  # that were measured
    policies: Mapping[str, PolicyRun]
    workflow_rate: float
    slots: int
    slots_in_use: float  # mean
    admission: str  # the rule: any | all

    @property
    def trained(self) -> dict[str, PolicyRun]:
        """The policies that are trained."""
        return {name: policy for name, policy in self.policies.items() if policy.trained}

    @property
    def workflow_bounds(self) -> dict[str, float]:
        """Workflows per second that each stage would allow, taken alone.

        Workflow slots: if all were always in use, at the workflows' mean duration. Serving of a policy: its calls per
        second over its calls per workflow. Training, at the admission rule's deciding policy: while it has room
        (``any``: the last to be full; ``all``: the first) tasks are started.
        """
        rate = self.workflow_rate
        if not rate:
            return {}
        bounds = {SLOTS: rate * self.slots / self.slots_in_use}
        training = {}
        for name, policy in self.policies.items():
            if policy.call_rate:
                bounds[f"serving of {name}"] = policy.bounds[SERVING] * rate / policy.call_rate
            if policy.trained and policy.trainable_rate and policy.busy:
                training[f"training of {name}"] = policy.bounds[TRAINING] * rate / policy.trainable_rate
        if training:
            decide = max if self.admission == "any" else min
            decisive = decide(training, key=training.__getitem__)
            bounds[decisive] = training[decisive]
        return bounds

    @property
    def workflows_bound_by(self) -> str | None:
        """The stage that is as good as busy; slots only where no other is, since workflows that wait fill them."""
        reached = {stage: rate for stage, rate in self.workflow_bounds.items() if self.workflow_rate >= ENOUGH * rate}
        found = {stage: rate for stage, rate in reached.items() if stage != SLOTS} or reached
        return min(found, key=found.__getitem__) if found else None

    @property
    def busiest(self) -> tuple[str, float]:
        """The stage that works for the largest share of the time, and that share."""
        shares = {f"serving of {name}": policy.serving_busy for name, policy in self.policies.items()}
        shares |= {f"training of {name}": policy.busy for name, policy in self.trained.items()}
        stage = max(shares, key=shares.__getitem__)
        return stage, shares[stage]


@dataclass(frozen=True)
class Run(Flow):
    """A simulation's outcome."""

    scenario: "Scenario"
    admission_share: float  # of the time: a task waited for room in training
    ended_at: float  # simulated second
    fates: Mapping[tuple[str, str | None], int]  # rows of the whole run by (policy, fate)
    rows: int
    faults: tuple[str, ...]  # what the audit found


def measure_policy(
    engine: "SimulatedEngine",
    trainer: "SimulatedTrainer | None",
    begin: Mapping[str, Any],
    end: Mapping[str, Any],
    queue_groups: Samples,
) -> PolicyRun:
    """Read the meters of one policy.

    Args:
        engine: its servers.
        trainer: ``None`` for a frozen policy.
        begin, end: its ``TrajectoryIngestor.stats`` at both ends of the window.
        queue_groups: its queue's length, seen now and then.
    """
    seconds = engine.window.seconds
    dropped = {reason: count - begin["dropped"].get(reason, 0) for reason, count in end["dropped"].items()}
    by_rule = sum(dropped.get(reason, 0) for reason in BY_RULE)
    return PolicyRun(
        trained=trainer is not None,
        serving_busy=engine.busy.mean / engine.slots,
        serving_queue=engine.queued.mean,
        gate_closed=trainer.gate.share("closed") if trainer else 0.0,
        call_rate=engine.calls / seconds,
        queue_groups=queue_groups.mean,
        phases={phase: trainer.phases.share(phase) for phase in ("wait", "train", "hold", "sync")} if trainer else {},
        trainable_rate=(end["accepted"] - begin["accepted"] - by_rule) / seconds,
        trained_rate=(end["trained"] - begin["trained"]) / seconds,
        dropped={reason: count for reason, count in dropped.items() if count},
        staleness_mean=trainer.staleness.mean if trainer else 0.0,
        staleness_max=trainer.staleness.largest if trainer else 0.0,
        version=str(engine.version),
    )
