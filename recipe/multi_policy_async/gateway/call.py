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
"""One generation (Call) and one request of an agent with its n generations (Exchange).

    RUNNING --last token--> DONE --last byte accepted, or a later request extends it--> KEPT
       |                     |
       +---------------------+--client gone, superseded, unchosen, late, policy down--> ABANDONED(reason)

An exchange runs as its own task and keeps its events, so that a retry of the same request joins it from the first
event instead of sampling twice; readers come and go.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..trajectory import VersionSpan
from .detokenizer import Detokenizer, StopScanner
from .errors import GatewayError
from .output_parsing import Parsed, Parser, ToolCall
from .request import AgentRequest
from .sampling import SamplingDecision
from .upstream import TokenChunk

if TYPE_CHECKING:
    from .history import Prompt


class CallState(str, Enum):
    RUNNING = "running"
    DONE = "done"
    KEPT = "kept"
    ABANDONED = "abandoned"


@dataclass(slots=True, eq=False)
class Call:
    """One choice of one request: what was sent to the engine and exactly what it sampled.

    Attributes:
        request_id: ``<workflow>:<agent>:<turn>``, with ``:<choice>`` after the first choice; attempts append ``#<k>``.
        ids, log_probs, versions: the sampled tokens up to and including the one that completed a stop string.
        stop_tokens: stop strings that are control tokens, by id: these have no text in which one could be found.
        content, reasoning, tool_calls: as the client sees them, without special tokens and stop strings.
    """

    request_id: str
    agent_id: str
    model_id: str
    turn: int
    choice: int
    prompt_ids: list[int]
    prompt: "Prompt"
    max_new_tokens: int
    sampling: SamplingDecision
    stop: tuple[str, ...]
    new_detokenizer: Callable[[], Detokenizer]
    new_parser: Callable[[], Parser]
    emit: Callable[["Call", Parsed], None]
    stream: bool
    stop_token_ids: tuple[int, ...]
    top_logprobs: int = 0
    stop_tokens: Mapping[int, str] = field(default_factory=dict)

    state: CallState = CallState.RUNNING
    reason: str | None = None
    finish_reason: str | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    alternatives: list[list[tuple[float, int]]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_matched: str | None = None
    cached_tokens: int = 0
    attempts: int = 0
    resumes: int = 0
    held_s: float = 0.0
    started_at: float = field(default_factory=time.time)
    first_token_at: float | None = None
    ended_at: float | None = None
    shown: bool = False  # the client may have seen a part of it
    received: bool = False  # the client accepted the last byte
    cut: bool = False  # the client sees less than was sampled: a stop string, or calls beyond the first
    extended_by: "Call | None" = None  # the first call that goes on from this answer
    rewritten: bool = False  # the client has other words in its place: superseded at the end, unless it returns to it
    bound: bool = False  # its prompt is too long to begin a row: it must go on in its parent's
    _detokenizer: Detokenizer | None = None
    _scanner: StopScanner | None = None
    _parser: Parser | None = None

    def accept(self, chunk: TokenChunk) -> bool:
        """Take sampled tokens.

        Returns:
            True when a stop string is complete: later tokens of this attempt are not part of the call.
        """
        if self._detokenizer is None:
            self._detokenizer, self._scanner = self.new_detokenizer(), StopScanner(self.stop)
            self._parser = self.new_parser()
        if self.first_token_at is None and chunk.ids:
            self.first_token_at = time.time()
        text, taken, stopped = self._read(chunk.ids)
        self.ids += chunk.ids[:taken]
        self.log_probs += chunk.log_probs[:taken]
        self.versions += chunk.versions[:taken]
        self.alternatives += chunk.top_logprobs[:taken]
        self.cached_tokens = self.cached_tokens or chunk.cached_tokens
        self._show(text)
        return stopped

    def _read(self, ids: list[int]) -> tuple[str, int, bool]:
        """Text of the tokens up to a stop string, how many these are, whether it is complete."""
        if not self.stop:
            return self._detokenizer.feed_all(ids), len(ids), False
        pieces = []
        for taken, token_id in enumerate(ids, 1):
            pieces.append(self._scanner.feed(self._detokenizer.feed(token_id)))
            if self._scanner.matched is not None:
                self.cut, self.stop_matched = True, self._scanner.matched
                return "".join(pieces), taken, True
        return "".join(pieces), len(ids), False

    def finish(self, reason: str) -> None:
        """The last token is in: ``stop`` or ``length``."""
        if self._detokenizer is not None:
            if self._scanner.matched is None:
                rest = self._scanner.feed(self._detokenizer.flush())
                self._show(rest if self._scanner.matched is not None else rest + self._scanner.flush())
            self._publish(self._parser.finish(self.ids))
        self.finish_reason = "tool_calls" if self.tool_calls and reason == "stop" else reason
        if self.finish_reason == "stop" and self.stop_matched is None and self.ids:
            self.stop_matched = self.stop_tokens.get(self.ids[-1])
        self.state = CallState.DONE
        self.ended_at = time.time()

    def restart(self) -> int:
        """Forget the tokens of the attempts so far, which the client has not seen.

        Returns:
            How many tokens were thrown away.
        """
        assert not self.shown, "an answer that the client has begun to read cannot start again"
        lost = len(self.ids)
        self.ids, self.log_probs, self.versions, self.alternatives = [], [], [], []
        self.content = self.reasoning = ""
        self.first_token_at = self._detokenizer = self._scanner = self._parser = None
        self.cut, self.stop_matched = False, None
        return lost

    def _show(self, text: str) -> None:
        if text:
            self._publish(self._parser.feed(text))

    def _publish(self, parsed: Parsed) -> None:
        self.content += parsed.content
        self.reasoning += parsed.reasoning
        self.tool_calls += parsed.tool_calls
        self.cut = self.cut or parsed.cut
        if parsed.content or parsed.reasoning or parsed.tool_calls:
            self.emit(self, parsed)

    @property
    def workflow_id(self) -> str:
        return self.request_id.split(":", 1)[0]

    @property
    def version_span(self) -> VersionSpan | None:
        """Oldest and newest version that sampled a token, None without tokens."""
        return VersionSpan(min(self.versions), max(self.versions)) if self.versions else None


@dataclass(slots=True)
class Event:
    """A piece of an answer, in the order it became known.

    Attributes:
        parsed: what to append to the answer.
        upto: sampled tokens of the call so far, for streamed log-probs.
        ended: the call is DONE.
    """

    choice: int
    parsed: Parsed = field(default_factory=Parsed)
    upto: int = 0
    ended: bool = False


class Exchange:
    """One request of one agent: its calls, its events, and who still reads them."""

    def __init__(self, exchange_id: str, agent_id: str, model_id: str, request: AgentRequest, digest: bytes) -> None:
        self.exchange_id = exchange_id
        self.agent_id = agent_id
        self.model_id = model_id
        self.request = request
        self.digest = digest
        self.created_at = time.time()
        self.calls: list[Call] = []
        self.events: list[Event] = []
        self.error: GatewayError | None = None
        self.ended = False
        self.readers = 0
        self.delivered = False  # some reader accepted the last byte
        self.client_left = False  # the last reader went before its last byte
        self.task: asyncio.Task[None] | None = None
        self.grace: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return not self.ended

    @property
    def abandoned(self) -> bool:
        """Not all of it will become training data."""
        return any(call.state == CallState.ABANDONED or call.rewritten for call in self.calls)

    def emit(self, call: Call, parsed: Parsed) -> None:
        if self.request.stream:  # a whole answer is written from its calls
            call.shown = True
            self.publish(Event(call.choice, parsed, len(call.ids)))

    def publish(self, event: Event) -> None:
        self.events.append(event)
        self._wake()

    def end(self, error: GatewayError | None = None) -> None:
        """No more events will come."""
        self.error = error
        self.ended = True
        self.task = None
        self._wake()

    def join_events(self) -> None:
        """Nobody reads, no events will come: a retry gets each choice in one piece. An event per token is large."""
        if self.ended and self.error is None:
            self.events = [
                Event(call.choice, Parsed(call.content, call.reasoning, call.tool_calls), len(call.ids), ended=True)
                for call in self.calls
            ]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> AsyncIterator[list[Event]]:
        """Events in the order they become known, those known already first, until no more will come."""
        seen = 0
        while True:
            new, seen = self.events[seen:], len(self.events)
            if new:
                yield new
            if self.ended and seen == len(self.events):
                return
            await self.wait_beyond(seen)

    async def wait_beyond(self, seen: int) -> None:
        """Return once there are more than ``seen`` events, or none will come."""
        while len(self.events) <= seen and not self.ended:
            await self._changed.wait()

    async def wait_ended(self) -> None:
        while not self.ended:
            await self._changed.wait()
