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
"""May production start another task? Only admission waits for training (invariant 10)."""

from collections.abc import Collection

from .group_queue import GroupQueue


def has_room(queues: Collection[GroupQueue], open_tasks: int, rule: str) -> bool:
    """Whether ``any`` or ``all`` of the policies that can train now are below their lead.

    Policies that cannot train now (frozen, retired, paused) are left out, else they would block the others. Once no
    trained policy is left to train, nothing is admitted; a job without trained policies is always admitted.
    """
    deciding = [queue for queue in queues if queue.can_train]
    if not deciding:
        return not any(queue.trained for queue in queues)
    decide = any if rule == "any" else all
    return decide(queue.has_room(open_tasks) for queue in deciding)
