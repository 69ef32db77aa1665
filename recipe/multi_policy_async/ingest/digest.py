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
"""Digest of a workflow record: tells a repeated finalize from a contradicting one."""

import hashlib
import json

from ..trajectory import WorkflowRecord
from .row_codec import without_metadata


def record_digest(record: WorkflowRecord, bodies: list[bytes]) -> bytes:
    """16 bytes over status, score, rewards, row payloads and images.

    Clock times, metadata and the wording of an error do not count.

    Args:
        record: the workflow's terminal record.
        bodies: ``row_codec.encode_arrays`` of its trajectories, in order.
    """
    rows = [
        [t.trajectory_id, t.model_id, t.agent_id, t.turn, t.incarnation, t.finish_reason, _plain(t.reward)]
        for t in record.trajectories
    ]
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([record.workflow_id, record.status, _plain(record.score), rows]).encode())
    for trajectory in record.trajectories:
        for data in trajectory.images:
            digest.update(trajectory.trajectory_id.encode() + image_digest(data))
    for body in bodies:
        for part in without_metadata(body):
            digest.update(part)
    return digest.digest()


def image_digest(data: bytes) -> bytes:
    """16 bytes that tell an encoded image from every other one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
