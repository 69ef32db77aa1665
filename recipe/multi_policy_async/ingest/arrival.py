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
"""A terminal record arrives: is it sound, which rows never wait, and what does it close?

Planning changes nothing. The ingestor commits the plan to the ledger and applies it only then.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..rewards import is_finite
from ..trajectory import Trajectory, WorkflowRecord
from .baselines import AgentOfModel, Baseline, observed
from .group_queue import GroupQueue
from .groups import OpenGroups, OpenTask, QueuedGroup, RowRef, group_key
from .ledger import FateChange, NewRow, TerminalCommit
from .reasons import (
    CONSTRAINED,
    FAILED_WORKFLOW,
    NON_FINITE,
    RECORDED,
    RETIRED,
    SHUTDOWN,
    SURPLUS,
    TRUNCATED,
)
from .spec import IngestSpec
from .turns import turns_by_agent


def check_record(record: WorkflowRecord, queues: Mapping[str, GroupQueue]) -> None:
    """Refuse a record that cannot be accounted for.

    Raises:
        ValueError: an unknown policy, a row of another workflow, two rows with one id, a row without a sampled token,
            a reward or score that is not finite, or a missing reward in a workflow that ended well.
    """
    where = f"workflow {record.workflow_id}"
    if record.score is not None and not is_finite(record.score):
        raise ValueError(f"{where}: score {record.score} is not finite")
    seen: set[str] = set()
    for row in record.trajectories:
        if row.workflow_id != record.workflow_id:
            raise ValueError(f"{where}: trajectory {row.trajectory_id} is of workflow {row.workflow_id}")
        if row.trajectory_id in seen:
            raise ValueError(f"{where}: two trajectories have the id {row.trajectory_id}")
        seen.add(row.trajectory_id)
        if row.model_id not in queues:
            known = ", ".join(sorted(queues)) or "none"
            raise ValueError(f"{where}: trajectory {row.trajectory_id} is of policy {row.model_id!r}; known: {known}")
        if not np.any(row.response_mask):
            raise ValueError(f"{where}: trajectory {row.trajectory_id} has no sampled token")
        if row.reward is None:
            if record.status == "ok" and queues[row.model_id].trained:
                raise ValueError(f"{where}: trajectory {row.trajectory_id} has no reward")
        elif not is_finite(row.reward):
            raise ValueError(f"{where}: trajectory {row.trajectory_id} has reward {row.reward}")


def fate_on_arrival(row: Trajectory, status: str, queue: GroupQueue, spec: IngestSpec, ended: bool) -> str | None:
    """Fate of a row that never waits, or ``None``; ``ended``: the producer was stopped."""
    if not queue.trained:
        return RECORDED
    if queue.retired:
        return RETIRED
    if status == "aborted" and ended:
        return SHUTDOWN
    if status != "ok" and (spec.on_failed == "drop" or status != "failed" or row.reward is None):
        return FAILED_WORKFLOW
    if not np.all(np.isfinite(row.log_probs)):
        return NON_FINITE
    if row.metadata.get("constrained"):
        return CONSTRAINED
    if spec.on_truncated == "drop" and (row.finish_reason == "length" or row.metadata.get("truncated")):
        return TRUNCATED
    return None


@dataclass(frozen=True)
class Arrival:
    """What one terminal record changes on disk (``commit``) and in memory (the rest)."""

    commit: TerminalCommit
    groups: OpenGroups  # of its task, if that stays open
    queued: dict[str, list[QueuedGroup]]  # by policy, if the task closes
    dropped: list[tuple[QueuedGroup, str]]  # groups that closing the task drops, with the reason


def plan_arrival(
    record: WorkflowRecord,
    bodies: list[bytes],
    digest: bytes,
    *,
    task: OpenTask,
    sample: int,
    queues: Mapping[str, GroupQueue],
    spec: IngestSpec,
    ended: bool,
    baselines: Mapping[AgentOfModel, Baseline],
    next_row_id: int,
    next_close: int,
    now: float,
) -> Arrival:
    """Plan a checked record.

    Args:
        record: the terminal record.
        bodies: encoded arrays of its trajectories.
        digest: of the record.
        task: its open task.
        sample: which member of the task it is.
        queues: all policies.
        spec: rules for failed and truncated rows.
        ended: whether the producer was stopped.
        baselines: moving averages of rewards so far.
        next_row_id: first free row id.
        next_close: the task's place in the closing order, if this record closes it.
        now: monotonic seconds.
    """
    rows: list[NewRow] = []
    rewards: list[tuple[AgentOfModel, float, float]] = []
    groups = task.groups.copy()
    turns = turns_by_agent(record.trajectories)
    for trajectory, body in zip(record.trajectories, bodies, strict=True):
        queue = queues[trajectory.model_id]
        fate = fate_on_arrival(trajectory, record.status, queue, spec, ended)
        group_id = group_key(queue.spec.group_by, record.workflow_id, trajectory)
        own_turns = turns[trajectory.agent_id]
        row = NewRow(next_row_id + len(rows), trajectory, group_id, fate, body, own_turns)
        rows.append(row)
        if fate is None:
            assert trajectory.reward is not None, "a row that waits has a reward"
            span, reward = trajectory.version_span, float(trajectory.reward)
            oldest, newest = span.oldest.number, span.newest.number
            ref = RowRef(row.row_id, trajectory.incarnation, oldest, newest, reward, own_turns)
            groups.add(trajectory.model_id, group_id, trajectory.agent_id, ref)
            if queue.spec.on_small_group == "ema":
                rewards.append(((trajectory.model_id, trajectory.agent_id), reward, queue.spec.ema_decay))
    closes = task.closes_with(sample)
    queued, dropped = _plan_close(groups, queues, now) if closes else ({}, [])
    commit = TerminalCommit(
        record=record,
        digest=digest,
        answer=dict(Counter(trajectory.model_id for trajectory in record.trajectories)),
        rows=rows,
        fates=[FateChange(group.row_ids, reason) for group, reason in dropped],
        closed=next_close if closes else None,
        baselines=observed(baselines, rewards),
    )
    return Arrival(commit, groups, queued, dropped)


def _plan_close(
    groups: OpenGroups, queues: Mapping[str, GroupQueue], now: float
) -> tuple[dict[str, list[QueuedGroup]], list[tuple[QueuedGroup, str]]]:
    queued: dict[str, list[QueuedGroup]] = {}
    dropped: list[tuple[QueuedGroup, str]] = []
    for group in groups.close(now):
        fate = queues[group.model_id].fate_of(group)
        if fate is None:
            queued.setdefault(group.model_id, []).append(group)
        else:
            dropped.append((group, fate))
    for model_id, new in queued.items():
        dropped += [(group, SURPLUS) for group in queues[model_id].surplus_with(new)]
    return queued, dropped
