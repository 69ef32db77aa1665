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
"""Kept calls -> training rows, token-exactly (invariant 1).

``per_call`` gives one row per call: its whole prompt as context, its sampled tokens under mask 1. ``merged`` joins the
calls of one conversation while its history only grows: the prompt of the first call, then sampled tokens under mask 1
and what came between the turns (template, user and tool text, added ends of turn) under mask 0. Either way each sampled
token stands under mask 1 exactly once: another branch carries it inside its prompt.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import numpy as np

from ..gateway_binding_registry import ModelBinding
from ..trajectory import NO_VERSION, Trajectory, VersionSpan
from .call import Call, CallState


@dataclass(slots=True)
class _Row:
    calls: list[Call]
    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    versions: list[int]
    incarnation: int = field(default=0)

    @classmethod
    def begin(cls, call: Call) -> "_Row":
        row = cls([], [], [], [], [], call.versions[0].incarnation)
        row.sampled(call)
        return row

    def context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [NO_VERSION] * len(ids)

    def sampled(self, call: Call) -> None:
        self.calls.append(call)
        self.ids += call.ids
        self.mask += [1] * len(call.ids)
        self.log_probs += call.log_probs
        self.versions += [version.number for version in call.versions]


def build_rows(
    workflow_id: str,
    calls: Iterable[Call],
    *,
    merged: bool,
    per_call_agents: Container[str] = (),
    binding: Callable[[str], ModelBinding | None],
) -> tuple[Trajectory, ...]:
    """Rows of a workflow's kept calls, in the order the rows began.

    Calls without a sampled token (an engine may stop at once) have nothing to train on and give no row of their own.
    A row that would outgrow ``max_response_length`` ends before the call that does not fit; that call begins the next
    row with the history as context, so no earlier turn is lost. Calls of ``per_call_agents`` are never merged.
    """
    rows: list[_Row] = []
    row_of: dict[int, _Row] = {}
    for call in calls:
        if not call.ids:
            continue
        parent = call.prompt.parent
        merge = merged and parent is not None and call.agent_id not in per_call_agents
        row = row_of.get(id(parent)) if merge else None
        if row is not None and _goes_on(row, call, parent, binding(call.model_id)):
            row.context(call.prompt_ids[len(parent.prompt_ids) + len(parent.ids) :])
            row.sampled(call)
        else:
            row = _Row.begin(call)
            rows.append(row)
        row_of[id(call)] = row
    count: dict[str, int] = {}
    trajectories = []
    for row in rows:
        agent_id = row.calls[0].agent_id
        index = count[agent_id] = count.get(agent_id, -1) + 1
        trajectories.append(_trajectory(workflow_id, f"{workflow_id}/{agent_id}/{index}", row))
    return tuple(trajectories)


def _goes_on(row: _Row, call: Call, parent: Call, binding: ModelBinding | None) -> bool:
    """Whether a call goes on in its parent's row: the first kept one, unless another has nowhere else to go."""
    if row.calls[-1] is not parent or row.incarnation != call.versions[0].incarnation:
        return False
    if call.sampling.constrained or parent.sampling.constrained:
        return False  # alone in its row: what was sampled freely is trained
    other = parent.extended_by
    if other is not None and other is not call and other.bound and other.state == CallState.KEPT:
        return False
    grown = len(call.prompt_ids) - len(row.calls[0].prompt_ids) + len(call.ids)
    return binding is None or grown <= binding.max_response_length


def _trajectory(workflow_id: str, trajectory_id: str, row: _Row) -> Trajectory:
    first, last = row.calls[0], row.calls[-1]
    return Trajectory(
        trajectory_id=trajectory_id,
        workflow_id=workflow_id,
        agent_id=first.agent_id,
        model_id=first.model_id,
        request_id=first.request_id,
        turn=first.turn,
        prompt_ids=np.asarray(first.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(row.ids, dtype=np.int32),
        response_mask=np.asarray(row.mask, dtype=np.uint8),
        log_probs=np.asarray(row.log_probs, dtype=np.float32),
        versions=np.asarray(row.versions, dtype=np.int32),
        incarnation=row.incarnation,
        finish_reason=last.finish_reason,
        images=tuple(image.data for image in last.prompt.images),
        metadata={
            "truncated": any(call.finish_reason == "length" for call in row.calls),
            "constrained": first.sampling.constrained,
            "calls": [call_metadata(call) for call in row.calls],
        },
    )


def call_metadata(call: Call) -> dict[str, object]:
    """What is worth knowing about a call besides its tokens; JSON types only."""
    span = call.version_span
    return {
        "request_id": call.request_id,
        "turn": call.turn,
        "choice": call.choice,
        "policy_version": None if span is None else [str(version) for version in span],
        "finish_reason": call.finish_reason,
        "truncated": call.finish_reason == "length",
        "sampled_tokens": len(call.ids),
        "attempts": call.attempts,
        "resumes": call.resumes,
        "sampling_overridden": dict(call.sampling.overridden),
        "cached_tokens": call.cached_tokens,
        "held_s": round(call.held_s, 4),
        "started_at": call.started_at,
        "first_token_at": call.first_token_at,
        "ended_at": call.ended_at,
    }


def version_vector(calls: Iterable[Call]) -> dict[str, VersionSpan]:
    """Model id -> oldest and newest version that took part in a workflow."""
    vector: dict[str, VersionSpan] = {}
    for call in calls:
        span = call.version_span
        if span is None:
            continue
        known = vector.get(call.model_id, span)
        vector[call.model_id] = VersionSpan(min(known.oldest, span.oldest), max(known.newest, span.newest))
    return vector
