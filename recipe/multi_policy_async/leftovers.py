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
"""What a killed runtime leaves in the cluster: its ranks and replicas die with it, its placement groups do not."""

import asyncio
import contextlib
import re
import time
from typing import Any

import ray

from .configuration.policy import RANKS_PER_MODEL
from .configuration.schema import PolicySpec
from .supervision import JobFailedError

GONE_S = 60.0  # a killed process, its memory and its names

_BY_RANK = re.compile(r"(?:rollout_pool|rollout_standalone|sglang_server|vllm_server)_(\d+)")
"""Names of replicas (verl/workers/rollout/replica.py, */async_server.py); every model has ranks of its own."""


async def clear_away(policy: PolicySpec) -> None:
    """Free what a killed runtime of this model held, and wait until its names are free again.

    Raises:
        JobFailedError: something of it does not go.
    """
    deadline = time.monotonic() + GONE_S
    while True:
        groups = _placement_groups(policy)
        for group in groups.values():
            ray.util.remove_placement_group(group)
        left = [*groups, *(name for name in ray.util.list_named_actors() if belongs_to(policy, name))]
        if not left:
            return
        if time.monotonic() > deadline:
            raise JobFailedError(f"{policy.model_id}: restart: still there after {GONE_S:g} s: {', '.join(left)}")
        await asyncio.sleep(0.2)


def belongs_to(policy: PolicySpec, name: str) -> bool:
    """Whether an actor or a placement group of this name is this model's, and not another one's of the same job."""
    replica = _BY_RANK.match(name)
    if replica is not None:
        return int(replica[1]) // RANKS_PER_MODEL == policy.replica_rank_offset // RANKS_PER_MODEL
    return name.startswith(f"{policy.namespace}_trainer_poolverl_group_")  # runtime/verl_adapter.py:trainer_resources


def _placement_groups(policy: PolicySpec) -> dict[str, Any]:
    found = {}
    for each in ray.util.placement_group_table().values():  # of all jobs on the cluster
        if each["state"] != "REMOVED" and belongs_to(policy, each["name"]):
            with contextlib.suppress(ValueError):  # it is gone, or another job's: names are looked up in this one's
                found[each["name"]] = ray.util.get_placement_group(each["name"])
    return found
