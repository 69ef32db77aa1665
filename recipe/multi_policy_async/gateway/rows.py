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
"""Kept calls -> training rows, token-exactly (invariant 1)."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..trajectory import Trajectory, VersionSpan
from .call import Call


def rows_per_call(workflow_id: str, calls: Iterable[Call]) -> tuple[Trajectory, ...]:
    """One row per call: the prompt as it was sent, the response exactly as the engine sampled it, mask all 1.

    Calls without a sampled token (an engine may stop at once) have nothing to train on and give no row.
    """
    rows: list[Trajectory] = []
    count: Counter[str] = Counter()
    for call in calls:
        if not call.ids:
            continue
        index = count[call.agent_id]
        count[call.agent_id] += 1
        rows.append(
            Trajectory(
                trajectory_id=f"{workflow_id}/{call.agent_id}/{index}",
                workflow_id=workflow_id,
                agent_id=call.agent_id,
                model_id=call.model_id,
                request_id=call.request_id,
                turn=call.turn,
                prompt_ids=np.asarray(call.prompt_ids, dtype=np.int32),
                response_ids=np.asarray(call.ids, dtype=np.int32),
                response_mask=np.ones(len(call.ids), dtype=np.uint8),
                log_probs=np.asarray(call.log_probs, dtype=np.float32),
                versions=np.asarray([version.number for version in call.versions], dtype=np.int32),
                incarnation=call.versions[0].incarnation,
                finish_reason=call.finish_reason,
                metadata=call_metadata(call),
            )
        )
    return tuple(rows)


def call_metadata(call: Call) -> dict[str, object]:
    """What is worth knowing about a call besides its tokens; JSON types only."""
    return {
        "choice": call.choice,
        "attempts": call.attempts,
        "resumes": call.resumes,
        "truncated": call.finish_reason == "length",
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
