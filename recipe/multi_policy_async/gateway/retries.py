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
"""Which request a retry means: SDKs mark their retries as such, and send the same body again."""

from collections import Counter

from .call import Exchange


class Retries:
    """The requests of one workflow by what they asked, and how many of them got no answer."""

    def __init__(self) -> None:
        self._same: dict[tuple[str, bytes], list[Exchange]] = {}
        self._unanswered: Counter[tuple[str, bytes]] = Counter()

    def add(self, exchange: Exchange) -> None:
        """A request that has begun."""
        self._same.setdefault((exchange.agent_id, exchange.digest), []).append(exchange)

    def note_unanswered(self, agent_id: str, digest: bytes) -> None:
        """A request got no answer and may be tried again; such a retry is none of another request."""
        self._unanswered[(agent_id, digest)] += 1

    def find(self, agent_id: str, digest: bytes) -> Exchange | None:
        """The exchange that a marked retry means, None when its first attempt never became one.

        A request whose reader left comes first; then one attempt that ended in an error is taken to be the one
        retried; then an answer that was delivered but, says the client, never arrived.
        """
        same = self._same.get((agent_id, digest), ())
        # An abandoned answer is no training data any more, so nobody may receive it.
        candidates = [e for e in same if e.error is None and not e.abandoned]
        for exchange in candidates:
            if exchange.client_left and exchange.readers == 0:
                return exchange
        if self._unanswered[(agent_id, digest)] > 0:
            self._unanswered[(agent_id, digest)] -= 1
            return None
        return candidates[-1] if candidates else None
