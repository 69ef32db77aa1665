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
"""How far the partners of a policy have moved on since the workflows that it trains on were played.

A row is trained as if the team around it were still the one that earned its reward. ``max_staleness`` bounds the age of
the policy's own tokens; this measures the age of the others.
"""

from collections.abc import Iterable, Mapping

from .group_queue import GroupQueue


def partner_staleness(
    queue: GroupQueue, vectors: Iterable[Mapping[str, int]], queues: Mapping[str, GroupQueue]
) -> dict[str, list[int]]:
    """Per partner in training: its newest version minus the oldest that answered, one number per row it took part in.

    0 where a restore has taken the partner behind what answered: its numbers are used again.

    Args:
        queue: of the policy whose rows are trained.
        vectors: per row, the oldest version number of each policy in the row's workflow.
        queues: of all policies.
    """
    ages: dict[str, list[int]] = {}
    for vector in vectors:
        for model_id, oldest in vector.items():
            partner = queues.get(model_id)
            if partner is None or partner is queue or not partner.trained or partner.newest_version is None:
                continue
            ages.setdefault(model_id, []).append(max(0, partner.newest_version - oldest))
    return ages
