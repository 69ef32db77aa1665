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
"""Servers whose answers make no sense."""

import asyncio

import openai
import pytest

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import one_model

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]

SENSELESS = {
    "a log-prob of text": {"output_ids": [80], "output_token_logprobs": [["-1.0", 80, None]]},
    "a log-prob of several numbers": {"output_ids": [80], "output_token_logprobs": [[[-1.0], 80, None]]},
    "an id of text": {"output_ids": ["80"], "output_token_logprobs": [[-1.0, "80", None]]},
    "an id below 0": {"output_ids": [-80], "output_token_logprobs": [[-1.0, -80, None]]},
    "an id that no row can hold": {"output_ids": [2**31], "output_token_logprobs": [[-1.0, 2**31, None]]},
    "an alternative without id": {"output_top_logprobs": [[[-1.0, None, None]]]},
    "more tokens than asked for": {"output_ids": [80] * 9, "output_token_logprobs": [[-1.0, 80, None]] * 9},
    "a version that no row can hold": {"weight_version": f"0.{2**31}"},
    "an incarnation that no row can hold": {"weight_version": f"{2**63}.1"},
    "a finish reason of text": {"finish_reason": "stop"},
}


@pytest.mark.parametrize("answer", SENSELESS.values(), ids=SENSELESS.keys())
def test_an_answer_that_makes_no_sense_is_the_servers_failure_and_costs_no_other_row(folder, texts, answer):
    class Senseless(FakeEngine):
        def _answer(self, rid, body, ids, kind):
            sensible = super()._answer(rid, body, ids, kind)
            if len(self.requests) <= 2:
                sensible["output_ids"] = answer.get("output_ids", ids)
                sensible["meta_info"].update(answer)
            return sensible

    async def run():
        async with one_model(folder, Senseless(texts.says("plan"))) as world:
            client = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.InternalServerError, match="servers of model planner_model failed"):
                await client.chat.completions.create(
                    model="any", messages=ASK, max_tokens=8, logprobs=True, top_logprobs=1
                )
            await client.chat.completions.create(model="any", messages=ASK)
            final = await world.control.finalize(W, rewards=1.0)
            return final["calls"], world.sink.rows, world.metric("errors_total", code="internal")

    calls, [row], bugs = asyncio.run(run())
    assert calls == {"kept": 1, "abandoned(policy_down)": 1} and bugs == 0
    assert row.response_ids.tolist() == texts.ids("plan")
