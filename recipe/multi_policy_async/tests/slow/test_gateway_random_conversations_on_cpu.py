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
"""Random conversations against an engine with known outputs: every token that the client kept is a row's, once."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ...agent_model_route_table import AgentModelRouteTable
from ...gateway.call import CallState
from ...gateway.errors import GatewayError
from ...gateway.openai_lowering import lower_chat
from ...gateway.service import GatewayService
from ...gateway.spec import GatewaySpec
from ...gateway.tokenizer import PolicyTokenizer
from ...gateway.upstream import Attempt, TokenChunk, UpstreamError
from ...gateway_binding_registry import GatewayBindingRegistry, ModelState, ModelStatus
from ...trajectory import Version
from ..fakes.gateway_world import DEFAULTS, CollectingSink, binding
from ..fakes.tiny_model_folder import make_model_folder

W = "e0-t0-s0-a0"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXTS = ("fine", "größer 😀", "a\n", "", "<think>hm</think>so", CALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), merges=(("a", "b"), ("f", "i"), ("fi", "n")))


@pytest.fixture(scope="module")
def tokenizer(folder) -> PolicyTokenizer:
    return PolicyTokenizer.load(str(folder))


class KnownUpstream:
    """Samples what a seeded generator says, cuts attempts, and remembers every token it gave out."""

    def __init__(self, tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self.version = Version(0, 0)
        self.answers: dict[str, list[int]] = {}
        self.cuts: list[str] = []  # what befalls the coming attempts: "abort" or "error"
        self._prompt_tokens: dict[str, int] = {}

    async def generate(self, attempt: Attempt):
        call = attempt.rid.split("#")[0]
        answer = self.answers.setdefault(call, self._new_answer())
        # What an earlier attempt has sampled stands behind the call's prompt, when this one goes on from it.
        done = len(attempt.input_ids) - self._prompt_tokens.setdefault(call, len(attempt.input_ids))
        assert attempt.input_ids[len(attempt.input_ids) - done :] == answer[:done]
        left = answer[done:]
        what = self.cuts.pop() if self.cuts else None
        at = self._rng.randrange(len(left) + 1) if what else len(left)
        for token in left[:at]:
            await asyncio.sleep(0)
            yield TokenChunk([token], [-0.25], [self.version])
        if what == "error":
            raise UpstreamError("connection lost")
        if what == "abort":
            self.version = Version(0, self.version.number + 1)
            yield TokenChunk([], [], [], finish="abort")
            return
        yield TokenChunk([], [], [], finish="stop" if left[-1:] == [self._tokenizer.end_of_turn_ids[0]] else "length")

    def _new_answer(self) -> list[int]:
        text = self._rng.choice(TEXTS)
        ids = self._tokenizer.encode(text)
        if self._rng.random() < 0.2:  # ids that are no encoding of their text, or of no text at all
            ids = [self._rng.randrange(256) for _ in range(self._rng.randrange(1, 6))]
        return ids + [self._tokenizer.end_of_turn_ids[0]]

    async def abort(self, rid: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Client:
    """An agent that keeps several conversations and knows which answers it kept."""

    def __init__(self, service: GatewayService, upstream: KnownUpstream, rng: random.Random) -> None:
        self.service = service
        self.session = service.sessions.create(W, "train")
        self.upstream = upstream
        self.rng = rng
        self.received: set[str] = set()  # only answers, delivered whole
        self.never_seen: set[str] = set()
        self.threads: list[list[dict]] = [[{"role": "user", "content": "begin"}]]

    async def ask(self, thread: list[dict], *, n: int = 1, deliver: bool = True, retry: bool = False) -> None:
        body = {"messages": thread, "n": n, "tools": [TOOL]}
        exchange = await self.service.start_exchange(
            self.session, "planner", lower_chat(body, max_choices=4), self.rng.randbytes(8)
        )
        if retry:  # its connection is lost at some point of the answer, or behind its end
            self.session.reader_came(exchange)
            await exchange.wait_beyond(self.rng.randrange(4))
            self.session.reader_went(exchange, delivered=exchange.ended and exchange.error is None)
            joined = self.session.retries.find("planner", exchange.digest)
            assert joined is (exchange if exchange.error is None else None)
        self.session.reader_came(exchange)
        await exchange.wait_ended()
        self.session.reader_went(exchange, delivered=deliver and exchange.error is None)
        ids = {call.request_id for call in exchange.calls}
        if exchange.error is not None or not deliver:
            self.never_seen |= ids
            return
        if n == 1:
            self.received |= ids
        call = self.rng.choice(exchange.calls)
        message = {"role": "assistant", "content": call.content}
        follow = {"role": "user", "content": self.rng.choice(["go on", "größer?", "<|im_end|>"])}
        if call.tool_calls:
            message["tool_calls"] = [
                {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in call.tool_calls
            ]
            follow = {"role": "tool", "tool_call_id": call.tool_calls[0].call_id, "content": "3"}
        self.threads.append([*thread, message, follow])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "choices", "leave", "retry", "rewrite", "edit", "abort", "error", "twice"]
        ),
        st.integers(0, 50),
    ),
    max_size=14,
)


ROOM = {"max_prompt_length": 2000, "max_response_length": 120, "max_model_len": 2200}
LITTLE_ROOM = {"max_prompt_length": 60, "max_response_length": 150, "max_model_len": 210}  # turns bound to their rows


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "room"), [("per_call", ROOM), ("merged", ROOM), ("merged", LITTLE_ROOM)])
@given(actions=ACTIONS, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_hold_the_sampled_tokens_of_kept_calls_once_each(
    folder, tokenizer, mode, room, actions, seed
):  # invariants 1, 2
    async def run():
        rng = random.Random(seed)
        sink = CollectingSink()
        spec = GatewaySpec.model_validate({**DEFAULTS, "rows": mode, "finalize_grace_s": 0.0})
        routes = AgentModelRouteTable({"planner": "m"}, ["m"])
        upstreams: list[KnownUpstream] = []

        def make(spec, bound):
            upstreams.append(KnownUpstream(tokenizer, rng))
            return upstreams[-1]

        service = GatewayService(spec, routes, GatewayBindingRegistry(["m"]), sink, make)
        await service.bind(binding("m", folder, "http://unused", **room))
        service.set_status("m", ModelStatus(ModelState.OPEN, Version(0, 0)))
        client = Client(service, upstreams[0], rng)
        for action, which in actions:
            thread = client.threads[which % len(client.threads)]
            try:
                await act(client, action, thread)
            except GatewayError as error:
                assert error.status in (400, 503), error
        calls = client.session.calls
        await service.closer.finalize(W, status="ok", rewards=1.0, score=None, error=None)
        return client, calls, upstreams[0], sink.rows

    async def act(client, action, thread):
        if action in ("abort", "error"):
            client.upstream.cuts = [action]
            await client.ask(thread)
        elif action == "choices":
            await client.ask(thread, n=3)
        elif action == "leave":
            await client.ask(thread, deliver=False)
        elif action == "retry":
            await client.ask(thread, retry=True)
        elif action == "twice":
            await asyncio.gather(client.ask(thread), client.ask(thread))
        elif action == "rewrite" and len(thread) > 2:
            await client.ask([*thread[:-2], {"role": "assistant", "content": "rewritten"}, thread[-1]])
        elif action == "edit" and len(thread) > 2:
            await client.ask([{"role": "user", "content": "another beginning"}, *thread[1:]])
        else:
            await client.ask(thread)

    client, calls, upstream, rows = asyncio.run(run())
    kept = [call for call in calls if call.state == CallState.KEPT]
    assert all(call.state in (CallState.KEPT, CallState.ABANDONED) for call in calls)
    assert all(call.reason for call in calls if call.state == CallState.ABANDONED)
    for call in kept:
        assert call.ids == upstream.answers[call.request_id]
    superseded = {call.request_id for call in calls if call.reason == "superseded"}
    kept_ids = {call.request_id for call in kept}
    assert client.received <= kept_ids | superseded and not client.never_seen & kept_ids
    assert not superseded or any(action in ("rewrite", "edit") for action, _ in actions)
    trained = Counter()
    for row in rows:
        assert len(row.response_ids) == len(row.response_mask) == len(row.log_probs) == len(row.versions)
        assert len(row.prompt_ids) <= room["max_prompt_length"] and len(row.response_ids) <= room["max_response_length"]
        assert (row.log_probs[row.response_mask == 1] == -0.25).all()
        assert (row.versions[row.response_mask == 0] == -1).all()
        trained.update(row.response_ids[row.response_mask == 1].tolist())
    assert trained == Counter(token for call in kept for token in call.ids)
    by_request = {m["request_id"] for row in rows for m in row.metadata["calls"]}
    assert by_request == {call.request_id for call in kept if call.ids}
    if mode == "per_call":
        assert all(row.response_mask.all() for row in rows)
