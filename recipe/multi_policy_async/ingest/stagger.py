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
"""Staggered weight sync: a policy waits with its sync while another one syncs, for a bounded time.

A policy's gate is closed while its weights are sent, and a workflow that calls several policies stands still when all
gates close at once, which they do for hours where periods are similar. A sync that waits begins this policy's next
period later, so its phase has moved and the next syncs meet no more: this is no lock. Nobody waits longer than
``max_wait_s`` per version, and a sync that lasts longer than that, or whose trainer died, holds nobody any more.
Policies know nothing of each other; each asks the ingestor before it publishes, as it does for ``on_stale: hold``.
"""

from collections import Counter


class SyncStagger:
    """When each policy may send its weights. All times are seconds of one monotonic clock.

    Args:
        max_wait_s: longest wait of a policy for others, per version; 0: never.
    """

    def __init__(self, max_wait_s: float):
        self._max_wait_s = max_wait_s
        self._asked: dict[str, float] = {}
        self._syncing: dict[str, float] = {}  # since when
        self._serving: set[str] = set()  # policies whose first version is served; the others wait for nobody
        self.waited_s: Counter[str] = Counter()  # by policy, since the start

    def wait_s(self, model_id: str, now: float) -> float:
        """Seconds until it is worth asking again; 0: the policy's sync begins now.

        Asking sooner does no harm, and a waiting policy should when another one's sync has ended.
        """
        if model_id not in self._serving:
            return 0.0
        asked = self._asked.setdefault(model_id, now)
        ends = [asked + self._max_wait_s]
        others = [since + self._max_wait_s for other, since in self._syncing.items() if other != model_id]
        holding = [end for end in others if end > now]
        if holding and ends[0] > now:
            return min(*ends, *holding) - now
        del self._asked[model_id]
        self.waited_s[model_id] += now - asked
        self._syncing[model_id] = now
        return 0.0

    def ended(self, model_id: str) -> None:
        """The policy's new version is served."""
        self._syncing.pop(model_id, None)
        self._serving.add(model_id)

    def forget(self, model_id: str) -> None:
        """The policy starts, again or for the first time, or syncs no more."""
        self._syncing.pop(model_id, None)
        self._asked.pop(model_id, None)
        self._serving.discard(model_id)
