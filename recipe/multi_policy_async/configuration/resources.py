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
"""What a job needs of a Ray cluster, and whether it can be placed, before any actor starts.

verl waits for its placement groups without a timeout, so a job that cannot be placed would hang.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .schema import JobSpec, PolicySpec

TRAINER_CPUS_PER_RANK = 3
"""verl/single_controller/ray/base.py, ``ResourcePoolManager.max_colocate_count``."""

ROLLOUT_CPUS_PER_RANK = 2
"""verl/workers/rollout/replica.py, ``init_standalone``."""

_MAX_STEPS = 20_000


@dataclass(frozen=True)
class Need:
    """GPUs and CPUs that one part needs together on one node.

    Args:
        part: ``<model id> trainer`` or ``<model id> rollout``.
        gpus: GPUs, logical ones on a CPU machine.
        cpus: CPUs, logical.
    """

    part: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Node:
    """Free resources of one node of the cluster."""

    name: str
    gpus: float
    cpus: float


class ResourcesError(ValueError):
    """The job cannot be placed on the cluster; the message shows what is needed and what is there."""


def policy_needs(policy: PolicySpec) -> list[Need]:
    """One entry per placement-group bundle set that must lie on one node."""
    trainer, rollout = policy.verl["trainer"], policy.verl["rollout"]
    needs = []
    if policy.train:
        per_node = trainer["n_gpus_per_node"]
        part = f"{policy.model_id} trainer"
        needs += [Need(part, per_node, per_node * TRAINER_CPUS_PER_RANK)] * trainer["nnodes"]
    per_node = min(policy.gpus_per_replica, rollout["n_gpus_per_node"])
    chunks = policy.num_replicas * (policy.gpus_per_replica // per_node)
    needs += [Need(f"{policy.model_id} rollout", per_node, per_node * ROLLOUT_CPUS_PER_RANK)] * chunks
    return needs


def job_needs(job: JobSpec) -> list[Need]:
    return [need for policy in job.models.values() for need in policy_needs(policy)]


def total(needs: Iterable[Need]) -> tuple[int, int]:
    """(GPUs, CPUs) of all needs together."""
    needs = list(needs)
    return sum(need.gpus for need in needs), sum(need.cpus for need in needs)


def local_ray_resources(job: JobSpec) -> dict[str, int]:
    """``num_gpus`` and ``num_cpus`` for a Ray started by this job.

    On a CPU machine both are logical: ranks share the cores. With GPUs Ray counts the real ones.
    """
    if job.device != "cpu":
        return {}
    gpus, cpus = total(job_needs(job))
    return {"num_gpus": gpus, "num_cpus": max(cpus, os.cpu_count() or 1)}


def table(needs: Sequence[Need], nodes: Sequence[Node] | None = None) -> str:
    """Needed resources per part, and what the cluster has, as aligned lines."""
    parts = list(dict.fromkeys(need.part for need in needs))
    rows = [("part", "GPUs", "CPUs", "spread")]
    for part in parts:
        own = [need for need in needs if need.part == part]
        gpus, cpus = total(own)
        rows.append((part, str(gpus), str(cpus), f"{len(own)} x {own[0].gpus} on one node"))
    gpus, cpus = total(needs)
    rows.append(("needed", str(gpus), str(cpus), ""))
    if nodes is not None:
        free_gpus, free_cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
        spread = ", ".join(f"{node.name}: {node.gpus:g} GPUs, {node.cpus:g} CPUs" for node in nodes)
        rows.append(("available", f"{free_gpus:g}", f"{free_cpus:g}", spread))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"  {name:<{width}}  {gpus:>5}  {cpus:>5}  {spread}".rstrip() for name, gpus, cpus, spread in rows)


def check(job: JobSpec, nodes: Sequence[Node]) -> str:
    """The table of needed and available resources.

    Raises:
        ResourcesError: the job does not fit.
    """
    needs = job_needs(job)
    shown = table(needs, nodes)
    (gpus, cpus), free_gpus = total(needs), sum(node.gpus for node in nodes)
    if gpus > free_gpus:
        raise ResourcesError(f"too few GPUs: the job needs {gpus}, the cluster has {free_gpus:g}\n{shown}\n{_ADVICE}")
    if cpus > sum(node.cpus for node in nodes):
        raise ResourcesError(f"too few CPUs: the job needs {cpus}\n{shown}\n{_ADVICE}")
    if not _fits(needs, nodes):
        raise ResourcesError(
            f"the parts do not fit on the nodes: each part's share must lie on one node\n{shown}\n{_ADVICE}"
        )
    return shown


_ADVICE = "lower trainer.n_gpus or rollout.n_gpus of a model, freeze one (train=false), or give Ray more"


def _fits(needs: Sequence[Need], nodes: Sequence[Node]) -> bool:
    """Whether every need finds a node: depth first, largest first; gives up in favour of the job after many steps."""
    ordered = sorted(needs, key=lambda need: (need.gpus, need.cpus), reverse=True)
    free = [[node.gpus, node.cpus] for node in nodes]
    steps = 0

    def place(index: int) -> bool:
        nonlocal steps
        steps += 1
        if index == len(ordered) or steps > _MAX_STEPS:
            return True
        need, tried = ordered[index], set()
        for room in free:
            if tuple(room) in tried or room[0] < need.gpus or room[1] < need.cpus:
                continue
            tried.add(tuple(room))
            room[0] -= need.gpus
            room[1] -= need.cpus
            if place(index + 1):
                return True
            room[0] += need.gpus
            room[1] += need.cpus
        return False

    return place(0)
