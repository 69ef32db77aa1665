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
"""What can be refused at once is refused before anything is done that takes long with a long request (invariant 9).

One agent's 8 MiB must not hold up the loop that serves all. Fakes: the engines.
"""

import asyncio
import threading
from contextlib import asynccontextmanager

import httpx
import pytest

from ..gateway.checks import fault
from ..gateway.off_loop import LONG_TEXT
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import one_model

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def agent(folder, texts, **kwargs):
    """``post(path, body)`` as the planner, and what its model's tokenizer had to do: (what, size, thread)."""
    async with one_model(folder, FakeEngine(texts.says("ok")), **kwargs) as world:
        url = (await world.open(W))["planner"].openai_base_url
        work = []
        watch(world.gateway.model("planner_model").tokenizer, work)
        async with httpx.AsyncClient(verify=False) as http:

            async def post(path, body):
                return await http.post(f"{url}/{path}", json=body)

            yield post, work


def watch(tokenizer, work):
    """Note the calls of a tokenizer that take time by what they are given."""

    def noting(name, do):
        def noted(given, *args, **kwargs):
            work.append((name, len(given), threading.get_ident()))
            return do(given, *args, **kwargs)

        return noted

    for name in ("render", "encode", "decode"):
        setattr(tokenizer, name, noting(name, getattr(tokenizer, name)))


@pytest.mark.parametrize("prompt", [[65] * 700, [[66] * 5, [65] * 700]])
def test_token_ids_longer_than_the_model_allows_are_counted_and_nothing_else(folder, texts, prompt):
    async def run():
        async with agent(folder, texts) as (post, work):
            return await post("completions", {"prompt": prompt}), work

    answer, work = asyncio.run(run())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], work) == (400, "context_length_exceeded", [])
    assert "is 512 tokens" in error["message"] and "resulted in 700 tokens" in error["message"]


@pytest.mark.parametrize(
    ("spec", "more", "code"),
    [
        ({"max_calls_per_workflow": 1}, {}, "too_many_calls"),
        ({"sampling": "refuse"}, {"temperature": 0.1}, "unsupported_value"),
        ({"model_names": "strict"}, {"model": "other"}, "model_not_found"),
        ({}, {"response_format": {"type": "json_object"}}, "unsupported_value"),
    ],
)
def test_what_is_refused_whatever_the_messages_say_is_refused_before_they_are_rendered(folder, texts, spec, more, code):
    async def run():
        async with agent(folder, texts, **spec) as (post, work):
            await post("chat/completions", {"messages": ASK, "model": "planner_model"})
            work.clear()
            return await post("chat/completions", {"messages": ASK, **more}), work

    answer, work = asyncio.run(run())
    assert (answer.json()["error"]["code"], work) == (code, [])


@pytest.mark.parametrize("rewards", [[1.0] * 9, {"planner": [1.0] * 9}, {f"{i}:a": 1.0 for i in range(9)}])
def test_more_rewards_than_there_can_be_trajectories_are_a_400(folder, texts, rewards):
    async def run():
        async with agent(folder, texts, max_calls_per_workflow=4, max_choices=2) as (post, _):
            return await post("rewards", {"rewards": rewards}), await post("rewards", {"reward": 1.0})

    refused, taken = asyncio.run(run())
    assert refused.status_code == 400 and "at most 8 trajectories" in refused.json()["error"]["message"]
    assert taken.status_code == 200


def test_a_fault_of_a_long_value_shows_its_beginning_without_writing_all_of_it():
    written = []

    class Item:
        def __repr__(self):
            written.append(self)
            return "item"

    message = fault("stop", "at most 16 strings", [Item() for _ in range(1000)]).message
    assert "item, item" in message and len(message) < 200 and len(written) < 10
    assert fault("n", "a number", "x" * 10**6).message.startswith("n must be a number, got 'xxx")


def test_a_long_prompt_of_ids_is_decoded_beside_the_loop(folder, texts):
    room = {"max_prompt_length": 2 * LONG_TEXT, "max_model_len": 3 * LONG_TEXT}

    async def run():
        async with agent(folder, texts, bindings={"planner_model": room}) as (post, work):
            for length in (10, LONG_TEXT + 1):
                assert (await post("completions", {"prompt": [65] * length})).status_code == 200
            return [(size, thread) for what, size, thread in work if what == "decode"]

    (_, short), (size, long) = asyncio.run(run())
    assert size == LONG_TEXT + 1 and short == threading.get_ident() != long
