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
"""One workflow's session: its exchanges, who reads them, and what becomes of their calls.

Rules (semantics of the gateway):

* An unfinished exchange whose last reader left waits ``retry_grace_s`` for its retry, then its calls are abandoned.
* Sealing lets running calls go on for ``finalize_grace_s``, abandons the rest, and refuses later requests with 409.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Container, Iterator
from contextlib import contextmanager
from enum import Enum

from ..clock import now
from ..ingest.reasons import ABANDON_REASONS
from ..rewards import Rewards, check_rewards
from .call import Call, CallState, Event, Exchange
from .errors import BadRequest, Busy, CallLost, GatewayError, TooManyCalls, UpstreamFailed, WorkflowClosed
from .history import ConversationIndex, Prompt
from .metrics import GatewayMetrics
from .output_parsing import Parsed
from .request import AgentRequest
from .retries import Retries
from .spec import GatewaySpec
from .upstream import UpstreamError

logger = logging.getLogger(__name__)


# What says that a call was lost because its model's servers could not be had.
_DOWN = (UpstreamError, UpstreamFailed, Busy)


class SessionState(str, Enum):
    OPEN = "open"
    SEALED = "sealed"  # finalize has begun: no new calls, running ones may end
    CLOSED = "closed"  # the terminal record is out


class WorkflowSession:
    """All calls of one workflow, for all its agents and models."""

    def __init__(
        self,
        workflow_id: str,
        token: str,
        purpose: str,
        spec: GatewaySpec,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workflow_id = workflow_id
        self.token = token
        self.purpose = purpose
        self.started_at = time.time()
        self.state = SessionState.OPEN
        self.exchanges: list[Exchange] = []
        self.conversations = ConversationIndex()
        self.retries = Retries()
        self.rewards: Rewards | None = None  # reported before finalize
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.closing = asyncio.Lock()  # held by finalize and abort
        self._spec = spec
        self._metrics = metrics
        self._turns: Counter[str] = Counter()
        self._clock = clock
        self._used_at = clock()
        self._in_use = 0

    # -- use -----------------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Somebody named this workflow."""
        self._used_at = self._clock()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request waits, runs or is read."""
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            self.touch()

    def idle_s(self) -> float:
        """Seconds since anybody used this workflow; 0 while somebody does, or a call runs on for its retry."""
        if self._in_use or self.closing.locked() or any(exchange.running for exchange in self.exchanges):
            return 0.0
        return self._clock() - self._used_at

    # -- requests ------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse requests of a workflow that is over.

        Raises:
            WorkflowClosed: it was finalized or aborted.
        """
        if self.state != SessionState.OPEN:
            raise WorkflowClosed(f"workflow {self.workflow_id} is finalized; its agents can make no more calls")

    def check_may_call(self) -> None:
        """Refuse calls of a workflow that is over, or made as many as it may.

        Raises:
            WorkflowClosed: it was finalized or aborted.
            TooManyCalls: the bound on calls is reached.
        """
        self.check_open()
        if len(self.exchanges) >= self._spec.max_calls_per_workflow:
            raise TooManyCalls(f"workflow {self.workflow_id} made {len(self.exchanges)} calls, it may not make more")

    def pause(self) -> None:
        """Hold new requests; running calls go on."""
        self.check_open()
        self._resumed.clear()

    def resume(self) -> None:
        """Let held requests go."""
        self._resumed.set()

    async def wait_resumed(self) -> None:
        """Return at once unless the workflow is paused.

        Raises:
            Busy: paused for longer than a request may be held.
        """
        if self._resumed.is_set():
            return
        try:
            async with asyncio.timeout(self._spec.hold_timeout_s):
                await self._resumed.wait()
        except TimeoutError:
            raise Busy(
                f"workflow {self.workflow_id} is paused",
                retry_after_s=self._spec.retry_after_s,
                code="workflow_paused",
            ) from None

    def report_rewards(self, rewards: Rewards, agents: Collection[str]) -> None:
        """Rewards known before the end; finalize uses them where it brings none, later reports win name by name.

        Raises:
            WorkflowClosed: it was finalized or aborted.
            BadRequest: a value is no finite number, an agent is none of ``agents``, or there are too many values.
        """
        self.check_open()
        most = self._spec.max_calls_per_workflow * self._spec.max_choices  # trajectories; looking at each value costs
        inner = rewards.values() if isinstance(rewards, dict) and len(rewards) <= most else ()
        count = sum(len(part) for part in (rewards, *inner) if isinstance(part, (list, dict)))
        if count > most:
            raise BadRequest(f"{count} rewards: a workflow can have at most {most} trajectories", param="rewards")
        try:
            rewards = check_rewards(self.workflow_id, rewards, agents)
        except ValueError as fault:
            raise BadRequest(str(fault), param="rewards") from fault
        if isinstance(rewards, dict) and isinstance(self.rewards, dict):
            self.rewards.update(rewards)
        else:
            self.rewards = rewards

    def new_exchange(self, agent_id: str, model_id: str, request: AgentRequest, digest: bytes) -> Exchange:
        """Register a request.

        Raises:
            WorkflowClosed, TooManyCalls: see ``check_may_call``.
        """
        self.check_may_call()
        turn = self._turns[agent_id]
        self._turns[agent_id] += 1
        exchange = Exchange(f"{self.workflow_id}:{agent_id}:{turn}", agent_id, model_id, request, digest)
        self.exchanges.append(exchange)
        self.retries.add(exchange)
        return exchange

    def start(self, exchange: Exchange, run: Callable[[Call], Awaitable[None]]) -> None:
        """Run the calls of an exchange as a task of their own."""
        exchange.task = asyncio.get_running_loop().create_task(self._run(exchange, run))

    async def _run(self, exchange: Exchange, run: Callable[[Call], Awaitable[None]]) -> None:
        async def one(call: Call) -> None:
            await run(call)
            self.conversations.add(call)
            self._metrics.call_seconds(call.model_id, call.ended_at - call.started_at)
            exchange.publish(Event(call.choice, upto=len(call.ids), ended=True))

        error: GatewayError | None = None
        try:
            if len(exchange.calls) == 1:
                await one(exchange.calls[0])
            else:
                await _all_or_first_error([one(call) for call in exchange.calls])
        except GatewayError as caught:
            error = caught
        except asyncio.CancelledError:
            over = self.state != SessionState.OPEN
            error = (
                WorkflowClosed(f"workflow {self.workflow_id} is over") if over else CallLost("the call was abandoned")
            )
        except Exception as caught:
            # A bug of ours: it must reach the log and the client, and must not take the session down.
            logger.exception("call %s failed", exchange.exchange_id)
            self._metrics.error("internal")
            error = UpstreamFailed(f"internal error: {type(caught).__name__}")
        if error is not None:
            self.retries.note_unanswered(exchange.agent_id, exchange.digest)
            down = any(isinstance(fault, _DOWN) for fault in (error, error.__cause__))
            self._abandon(exchange, "policy_down" if down else "superseded")
        exchange.end(error)

    def find_exchange(self, agent_id: str, exchange_id: str) -> Exchange | None:
        """By id; None when this agent has no such exchange."""
        own = (exchange for exchange in reversed(self.exchanges) if exchange.agent_id == agent_id)
        return next((exchange for exchange in own if exchange.exchange_id == exchange_id), None)

    # -- readers -------------------------------------------------------------------------------------------------

    def reader_came(self, exchange: Exchange) -> None:
        exchange.readers += 1
        exchange.client_left = False
        if exchange.grace is not None:
            exchange.grace.cancel()
            exchange.grace = None

    def reader_went(self, exchange: Exchange, *, delivered: bool) -> None:
        """A reader is done: it accepted the last byte, or it left before."""
        exchange.readers -= 1
        if exchange.readers == 0:
            exchange.join_events()
        if delivered:
            exchange.delivered = True
            for call in exchange.calls:
                call.received = True
            if exchange.request.n == 1:
                for call in exchange.calls:
                    self.keep(call)
        elif exchange.readers == 0 and not exchange.delivered and exchange.error is None:
            exchange.client_left = True
            loop = asyncio.get_running_loop()
            exchange.grace = loop.call_later(self._spec.retry_grace_s, self._grace_over, exchange)

    def _grace_over(self, exchange: Exchange) -> None:
        exchange.grace = None
        if exchange.readers == 0 and not exchange.delivered:
            if exchange.ended:
                self.retries.note_unanswered(exchange.agent_id, exchange.digest)
            self._abandon(exchange, "client_gone")

    def goes_on(self, call: Call, prompt: Prompt) -> None:
        """What a new call's history says about earlier answers: which one the client has, and which one it rewrote."""
        rewritten = prompt.supersedes
        if rewritten is not None and rewritten.extended_by is None:
            rewritten.rewritten = True
            if rewritten.bound and rewritten.state in (CallState.DONE, CallState.KEPT):
                self._abandon_call(rewritten, "superseded")  # its place is another's now: it has no row to return to
        for earlier in prompt.earlier:
            self.keep(earlier)
            earlier.rewritten = False
            if earlier.extended_by is None or (call.bound and earlier is prompt.parent):
                earlier.extended_by = call

    # -- the fate of calls -----------------------------------------------------------------------------------------

    def keep(self, call: Call) -> None:
        """The client has this answer: the call becomes training data."""
        if call.state == CallState.DONE:
            call.state = CallState.KEPT

    def _abandon(self, exchange: Exchange, reason: str) -> None:
        if exchange.task is not None and not exchange.task.done():
            exchange.task.cancel()
        for call in exchange.calls:
            if call.state in (CallState.RUNNING, CallState.DONE):
                self._abandon_call(call, reason)

    def _abandon_call(self, call: Call, reason: str) -> None:
        assert reason in ABANDON_REASONS, reason
        call.state, call.reason = CallState.ABANDONED, reason
        self._metrics.call_ended(call.model_id, reason, len(call.ids))
        for earlier in call.prompt.earlier:
            if earlier.extended_by is call:
                branches = (c for c in self.calls if earlier in c.prompt.earlier and c.state != CallState.ABANDONED)
                earlier.extended_by = next(branches, None)

    async def seal(self) -> None:
        """No new calls; wait for running ones, then abandon what is not kept. May be called again."""
        self.state = SessionState.SEALED
        self._resumed.set()  # held requests get their 409
        running = [e.task for e in self.exchanges if e.task is not None and e.running and not e.client_left]
        if running:
            await asyncio.wait(running, timeout=self._spec.finalize_grace_s)
        await self._readers_done()
        for exchange in self.exchanges:
            if exchange.grace is not None:
                exchange.grace.cancel()
            if exchange.running:
                self._abandon(exchange, "client_gone" if exchange.client_left else "late")
            elif not exchange.delivered:
                self._abandon(exchange, "client_gone")
        await self._settle()

    def chosen_calls(self, names: Container[str]) -> list[Call]:
        """What becomes rows: kept calls that were not rewritten, and answers that the rewards name by request id."""
        whole = [call for call in self.calls if call.state in (CallState.DONE, CallState.KEPT)]
        return [c for c in whole if (c.state == CallState.KEPT and not c.rewritten) or c.request_id in names]

    def settle(self, chosen: list[Call]) -> None:
        """The fate of every call is known: keep the chosen ones, abandon the others."""
        for call in chosen:
            self.keep(call)
            call.rewritten = False
        for call in self.calls:
            if call.rewritten and call.state in (CallState.DONE, CallState.KEPT):
                self._abandon_call(call, "superseded")
            elif call.state == CallState.KEPT:
                self._metrics.call_ended(call.model_id, "kept", len(call.ids))
            elif call.state == CallState.DONE:
                self._abandon_call(call, "unchosen")

    async def _readers_done(self) -> None:
        """An answer that ended within the grace still has to reach its reader, or it would count as undelivered."""
        deadline = now() + min(1.0, self._spec.finalize_grace_s)
        while any(e.readers and e.ended and not e.delivered for e in self.exchanges) and now() < deadline:
            await asyncio.sleep(0.005)

    async def abandon_all(self, reason: str) -> None:
        """Abort: no call of this workflow becomes training data."""
        self.state = SessionState.SEALED
        self._resumed.set()
        for exchange in self.exchanges:
            for call in exchange.calls:
                if call.state == CallState.KEPT:
                    self._abandon_call(call, reason)
            self._abandon(exchange, reason)
        await self._settle()

    async def _settle(self) -> None:
        tasks = [e.task for e in self.exchanges if e.task is not None and not e.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    def release(self) -> None:
        """Undo references in circles, so that all memory goes at once and not when the collector comes round."""
        for call in self.calls:
            call.emit, call.extended_by = _nobody_listens, None

    # -- views ---------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Call]:
        """In the order they began."""
        return [call for exchange in self.exchanges for call in exchange.calls]

    def status(self) -> dict[str, object]:
        """For the control API."""
        counts = Counter(
            call.state.value if call.reason is None else f"{call.state.value}({call.reason})" for call in self.calls
        )
        return {
            "workflow_id": self.workflow_id,
            "state": self.state.value if self._resumed.is_set() else "paused",
            "purpose": self.purpose,
            "started_at": self.started_at,
            "calls": dict(counts),
        }


def _nobody_listens(call: Call, parsed: Parsed) -> None:
    """In the place of an exchange that is over."""


async def _all_or_first_error(coroutines: list[Awaitable[None]]) -> None:
    """Like ``asyncio.gather``, but nothing goes on behind its back after an error or a cancellation."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
