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
"""verl's client as an upstream gives the same rows as the router does."""

import asyncio
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from ..gateway.upstream import UpstreamError, check_chunk
from ..gateway.verl_upstream import VerlClientUpstream
from ..trajectory import Version
from .fakes.fake_engine import FakeEngine, log_prob_of
from .fakes.gateway_world import ALPHABET, gateway_world, one_model

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


class LLMServerClient:
    """A stand-in under the name of verl's class: one attempt per call, as verl's base class makes it."""

    def __init__(self, script, end: int, *, cut_first_at: int | None = None, change=None) -> None:
        self.script = script
        self.end = end
        self.cut = cut_first_at
        self.change = change  # of the first two answers
        self.global_steps = 1
        self.calls: list[dict] = []
        self._prompt_tokens: dict[str, int] = {}

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.calls.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params})
        start = self._prompt_tokens.setdefault(request_id.split("#")[0], len(prompt_ids))
        left = self.script(prompt_ids[:start])[len(prompt_ids) - start :][: sampling_params["max_new_tokens"]]
        reason = "completed"
        if self.cut is not None:
            left, self.cut, reason = left[: self.cut], None, "aborted"
        output = SimpleNamespace(
            token_ids=left,
            log_probs=[log_prob_of(token) for token in left],
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps},
        )
        self.global_steps += reason == "aborted"
        return await self.change(output) if self.change and len(self.calls) <= 2 else output


class FullyAsyncLLMServerClient(LLMServerClient):
    """verl's subclass resumes by itself and reports two versions only: it must not be used."""

    async def generate(self, request_id, **kwargs):
        raise AssertionError("the gateway resumes, not verl's client")


def rows_through(folder, texts, upstream, **client_kwargs):
    """The same two calls, streamed and not, through one upstream."""

    async def run():
        engine = FakeEngine(texts.says(ALPHABET))
        client = FullyAsyncLLMServerClient(texts.says(ALPHABET), texts.end, **client_kwargs)
        changes = {"planner_model": {"verl_client": client}}
        mapping = {"planner": "planner_model"}
        async with gateway_world(
            folder, {"planner_model": engine}, mapping=mapping, bindings=changes, upstream=upstream
        ) as world:
            agent = world.client((await world.open(W))["planner"])
            whole = await agent.chat.completions.create(model="m", messages=ASK)
            short = await agent.chat.completions.create(model="m", messages=ASK, max_tokens=5)
            stream = await agent.chat.completions.create(model="m", messages=ASK, stream=True, stop=["k"])
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            await world.control.finalize(W, rewards=1.0)
            said = (whole.choices[0].message.content, short.choices[0].finish_reason, streamed)
            return said, world.sink.rows, client

    return asyncio.run(run())


def test_both_upstreams_give_the_same_answers_and_the_same_rows(folder, texts):
    said, rows, _ = rows_through(folder, texts, "sglang_router")
    said_by_verl, rows_of_verl, client = rows_through(folder, texts, "verl_client")
    assert said == said_by_verl == (ALPHABET, "length", "abcdefghij")
    for ours, theirs in zip(rows, rows_of_verl, strict=True):
        for name in ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.finish_reason, ours.incarnation) == (theirs.finish_reason, theirs.incarnation)
    assert client.calls[0]["request_id"] == f"{W}:planner:0#0" and client.calls[0]["logprobs"] is True


def test_an_aborted_call_is_resumed_by_the_gateway_with_a_version_per_token(folder, texts):  # invariant 5
    (whole, *_), rows, client = rows_through(folder, texts, "verl_client", cut_first_at=7)
    assert whole == ALPHABET
    assert rows[0].versions.tolist() == [1] * 7 + [2] * (len(texts.ids(ALPHABET)) - 7)
    assert client.calls[1]["request_id"] == f"{W}:planner:0#1" and client.calls[1]["max_new_tokens"] == 64 - 7


def test_a_failing_client_is_a_503_and_missing_alternatives_are_a_400(folder, texts):
    class Broken:
        async def generate(self, request_id, **kwargs):
            raise RuntimeError("No available servers in load balancer")

    async def run():
        engine = FakeEngine(texts.says("x"))
        mapping = {"planner": "planner_model"}
        changes = {"planner_model": {"verl_client": Broken()}}
        async with gateway_world(
            folder, {"planner_model": engine}, mapping=mapping, bindings=changes, upstream="verl_client"
        ) as world:
            agent = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.InternalServerError, match="No available servers") as dead:
                await agent.chat.completions.create(model="m", messages=ASK)
            with pytest.raises(openai.BadRequestError, match="sglang_router"):
                await agent.chat.completions.create(model="m", messages=ASK, logprobs=True, top_logprobs=1)
            return dead.value.status_code

    assert asyncio.run(run()) == 503


SENSELESS = {
    "nothing": None,
    "no ids": {"token_ids": None},
    "an id of text": {"token_ids": ["80"]},
    "an id that is not whole": {"token_ids": [80.5]},
    "an id below 0": {"token_ids": [-1]},
    "an id that no row can hold": {"token_ids": [2**31]},
    "a log-prob that is none": {"log_probs": [[]]},
    "fewer log-probs than ids": {"log_probs": []},
    "a stop reason that is none": {"stop_reason": ["completed"]},
    "no fields": {"extra_fields": None},
    "a version of text": {"extra_fields": {"global_steps": "many"}},
    "a version below 0": {"extra_fields": {"global_steps": -1}},
    "a version that no row can hold": {"extra_fields": {"global_steps": 2**31}},
    "more tokens than asked for": {"token_ids": [80] * 9, "log_probs": [0.0] * 9},
}


def with_client(folder, texts, client, **spec):
    """One call that fails, one that does not; then the rows, and how many errors counted as the gateway's own."""

    async def run():
        changes = {"planner_model": {"verl_client": client}}
        engine = FakeEngine(texts.says("x"))
        async with one_model(folder, engine, bindings=changes, upstream="verl_client", **spec) as world:
            agent = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.InternalServerError, match="servers of model planner_model failed"):
                await agent.chat.completions.create(model="m", messages=ASK, max_tokens=8)
            await agent.chat.completions.create(model="m", messages=ASK)
            final = await world.control.finalize(W, rewards=1.0)
            return final["calls"], world.sink.rows, world.metric("errors_total", code="internal")

    calls, [row], bugs = asyncio.run(run())
    assert calls == {"kept": 1, "abandoned(policy_down)": 1} and bugs == 0
    return row


@pytest.mark.parametrize("answer", SENSELESS.values(), ids=SENSELESS.keys())
def test_an_answer_that_makes_no_sense_is_the_servers_failure_and_costs_no_other_row(folder, texts, answer):
    async def change(output):
        one = {"token_ids": [80], "log_probs": [0.0], "extra_fields": {"global_steps": 1}}
        return answer and SimpleNamespace(**{**vars(output), **one, **answer})

    row = with_client(folder, texts, LLMServerClient(texts.says("plan"), texts.end, change=change))
    assert row.response_ids.tolist() == texts.ids("plan")


def test_an_answer_that_never_comes_is_given_up(folder, texts):  # invariant 10
    async def change(output):
        await asyncio.Event().wait()

    with_client(folder, texts, LLMServerClient(texts.says("plan"), texts.end, change=change), read_timeout_s=0.05)


def test_numbers_of_other_libraries_are_numbers():
    numbers = {"token_ids": np.asarray([1, 2]), "log_probs": list(np.asarray([0.0, -1.0], dtype=np.float32))}
    output = SimpleNamespace(**numbers, stop_reason="completed", extra_fields={"global_steps": np.int64(1)})
    attempt = SimpleNamespace(max_new_tokens=5, stop_token_ids=())
    chunk = VerlClientUpstream(LLMServerClient(None, 0), 0, answer_timeout_s=1)._chunk(attempt, output)
    check_chunk(chunk)
    assert (chunk.ids, chunk.log_probs, chunk.versions) == ([1, 2], [0.0, -1.0], [Version(0, 1)] * 2)


def test_a_binding_without_a_client_cannot_be_served_this_way(folder, texts):
    async def run():
        mapping = {"planner": "planner_model"}
        async with gateway_world(
            folder, {"planner_model": FakeEngine(texts.says("x"))}, mapping=mapping, upstream="verl_client"
        ):
            pass

    with pytest.raises(ValueError, match="no verl client"):
        asyncio.run(run())


def test_an_unstamped_answer_is_refused():
    output = SimpleNamespace(token_ids=[1], log_probs=[0.0], stop_reason="completed", extra_fields={})
    attempt = SimpleNamespace(max_new_tokens=5, stop_token_ids=())
    with pytest.raises(UpstreamError, match="global_steps"):
        VerlClientUpstream(LLMServerClient(None, 0), 0, answer_timeout_s=1)._chunk(attempt, output)
