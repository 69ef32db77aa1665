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
"""Ends workflows that were left behind: created through the control API and never finalized (invariant 10)."""

import asyncio
import logging

from .closing import WorkflowCloser
from .metrics import GatewayMetrics
from .session_store import SessionStore

logger = logging.getLogger(__name__)

_LOOKS_PER_BOUND = 10


class IdleReaper:
    """Aborts workflows that nobody has used for ``idle_s`` seconds.

    A workflow in use has a request that waits, runs or is read, or was named in an agent's or a control call within
    that time. The job's own driver ends its workflows long before (the configuration checks that), so what is found
    here belongs to somebody who went away.
    """

    def __init__(self, store: SessionStore, closer: WorkflowCloser, metrics: GatewayMetrics, *, idle_s: float) -> None:
        self._store = store
        self._closer = closer
        self._metrics = metrics
        self._idle_s = idle_s

    async def run(self) -> None:
        """Look for ever, often enough to be late by a tenth at most."""
        while True:
            await asyncio.sleep(self._idle_s / _LOOKS_PER_BOUND)
            await self.reap()

    async def reap(self) -> list[str]:
        """Abort what is idle, each looked at in its turn: before it others may have waited for the ingestor.

        Returns:
            The ids.
        """
        reaped = []
        for session in self._store.open_sessions:
            if session.idle_s() <= self._idle_s:
                continue
            workflow_id = session.workflow_id
            reason = f"not used for {self._idle_s:g} s (gateway.workflow_idle_s), neither finalized nor aborted"
            logger.warning("workflow %s: %s", workflow_id, reason)
            await self._closer.abort(workflow_id, error=reason, forget=True)
            self._metrics.workflow_reaped()
            reaped.append(workflow_id)
        return reaped
