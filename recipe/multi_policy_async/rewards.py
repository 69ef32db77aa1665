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
"""Resolves what a workflow reports as reward onto its trajectories."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .trajectory import Trajectory

Rewards = float | Mapping[str, float] | None


def resolve_rewards(
    workflow_id: str,
    rewards: Rewards,
    trajectories: Sequence[Trajectory],
    *,
    agents: Collection[str],
    trained_models: Collection[str],
    required: bool = True,
) -> tuple[Trajectory, ...]:
    """Give every trajectory its reward.

    A number goes to all trajectories; a mapping holds trajectory ids, request ids (of a trajectory's first call) or
    agent ids, the more special name winning. A known agent without trajectories may be named: it was not called.

    Args:
        agents: the agents of the job; other names in a mapping are faults.
        trained_models: models whose rows enter training, and therefore need a reward.
        required: False for failed workflows, whose rows may stay without a reward.

    Returns:
        The trajectories in their order, with ``reward`` set.

    Raises:
        ValueError: naming the workflow, for a reward that is missing, not a finite number, or addressed to an
            unknown agent or trajectory.
    """
    by_name: Mapping[str, float] = {}
    everywhere: float | None = None
    if isinstance(rewards, Mapping):
        known = set(agents) | {t.trajectory_id for t in trajectories} | {t.request_id for t in trajectories}
        unknown = sorted(str(name) for name in rewards if name not in known)
        if unknown:
            raise ValueError(
                f"workflow {workflow_id}: rewards name unknown agents or trajectories {unknown}; known agents are "
                f"{sorted(agents)}, trajectories {[t.trajectory_id for t in trajectories]}"
            )
        by_name = {name: _finite(workflow_id, name, value) for name, value in rewards.items()}
    elif rewards is not None:
        everywhere = _finite(workflow_id, "reward", rewards)

    resolved = []
    for trajectory in trajectories:
        names = (trajectory.trajectory_id, trajectory.request_id, trajectory.agent_id)
        reward = next((by_name[name] for name in names if name in by_name), everywhere)
        if reward is None and required and trajectory.model_id in trained_models:
            raise ValueError(
                f"workflow {workflow_id}: trajectory {trajectory.trajectory_id} of trained model "
                f"{trajectory.model_id} has no reward"
            )
        resolved.append(replace(trajectory, reward=reward))
    return tuple(resolved)


def _finite(workflow_id: str, name: str, value: object) -> float:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"workflow {workflow_id}: {name} is {value!r}, not a finite number")
    return float(value)
