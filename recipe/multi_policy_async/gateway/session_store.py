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
"""All sessions of a gateway, open and closed, both bounded."""

import re
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from .errors import BadRequest, Busy, NotFound, WorkflowClosed
from .metrics import GatewayMetrics
from .session import SessionState, WorkflowSession
from .spec import GatewaySpec

_WORKFLOW_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")  # no colon: request ids are joined by it
PURPOSES = ("train", "eval")


@dataclass(slots=True)
class ClosedWorkflow:
    """What is remembered of a closed workflow: enough to answer a repeated finalize and late requests."""

    workflow_id: str
    token: str
    packed: bytes  # the answer, a tenth of its size as objects: there are many

    @property
    def answer(self) -> dict[str, Any]:
        """What finalize or abort answered."""
        return orjson.loads(zlib.decompress(self.packed))


class SessionStore:
    """Workflows by id and by their secret token. Looking an open one up counts as using it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, spec: GatewaySpec, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spec = spec
        self._metrics = metrics
        self._open: dict[str, WorkflowSession] = {}
        self._closed: OrderedDict[str, ClosedWorkflow] = OrderedDict()
        self._by_token: dict[str, str] = {}

    def create(self, workflow_id: str, purpose: str) -> WorkflowSession:
        """A new session, or the open one of that id.

        Raises:
            BadRequest: the id or purpose has another form, or the id is open for another purpose.
            WorkflowClosed: the workflow is over.
            Busy: too many open workflows.
        """
        if not isinstance(workflow_id, str) or not _WORKFLOW_ID.fullmatch(workflow_id):
            raise BadRequest(f"workflow_id must match {_WORKFLOW_ID.pattern}", param="workflow_id")
        if purpose not in PURPOSES:
            raise BadRequest(f"purpose must be one of {list(PURPOSES)}", param="purpose")
        if (session := self._open.get(workflow_id)) is not None:
            session.check_open()
            if session.purpose != purpose:
                raise BadRequest(f"workflow {workflow_id} is open for {session.purpose}", param="purpose")
            session.touch()
            return session
        if workflow_id in self._closed:
            raise WorkflowClosed(f"workflow {workflow_id} is finalized")
        if len(self._open) >= self._spec.max_open_workflows:
            raise Busy(
                f"{len(self._open)} workflows are open, as many as there may be",
                retry_after_s=self._spec.retry_after_s,
                code="too_many_workflows",
            )
        session = WorkflowSession(
            workflow_id, secrets.token_urlsafe(24), purpose, self._spec, self._metrics, self._clock
        )
        self._open[workflow_id] = session
        self._by_token[session.token] = workflow_id
        self._count()
        return session

    def by_token(self, token: str) -> WorkflowSession:
        """The session an agent URL means.

        Raises:
            NotFound: no such token; it is a secret, so none is named.
            WorkflowClosed: the workflow is over.
        """
        workflow_id = self._by_token.get(token)
        if workflow_id is None:
            raise NotFound("workflow", "of this URL")
        return self.by_id(workflow_id)

    def by_id(self, workflow_id: str) -> WorkflowSession:
        """A session that is not over.

        Raises:
            NotFound: never created here, or closed so long ago that it is forgotten.
            WorkflowClosed: the workflow is over.
        """
        found = self.find(workflow_id)
        if not isinstance(found, WorkflowSession):
            raise WorkflowClosed(f"workflow {workflow_id} is finalized; its agents can make no more calls")
        return found

    def find(self, workflow_id: str) -> WorkflowSession | ClosedWorkflow:
        """By id.

        Raises:
            NotFound: never created here, or closed so long ago that it is forgotten.
        """
        found = self._open.get(workflow_id) or self._closed.get(workflow_id)
        if found is None:
            raise NotFound("workflow", workflow_id)
        if isinstance(found, WorkflowSession):
            found.touch()
        return found

    def close(self, session: WorkflowSession, answer: dict[str, Any]) -> None:
        """Forget a session's calls; remember its answer."""
        session.state = SessionState.CLOSED
        session.release()
        del self._open[session.workflow_id]
        self._closed[session.workflow_id] = ClosedWorkflow(
            session.workflow_id, session.token, zlib.compress(orjson.dumps(answer), 1)
        )
        while len(self._closed) > self._spec.max_closed_workflows:
            _, oldest = self._closed.popitem(last=False)
            del self._by_token[oldest.token]
        self._count()

    def _count(self) -> None:
        self._metrics.workflows(open_now=len(self._open), closed=len(self._closed))

    @property
    def open_sessions(self) -> list[WorkflowSession]:
        return list(self._open.values())
