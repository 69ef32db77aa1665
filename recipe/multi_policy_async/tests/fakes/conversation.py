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
"""An agent's conversation with a gateway whose engine says known things."""

import asyncio

from .gateway_world import gateway_world

W = "e0-t0-s0-a0"
ROOMY = {"max_prompt_length": 1024, "max_response_length": 512, "max_model_len": 1536}


def one_model(folder, engine, *, binding=None, **spec):
    """A world of two agents on one model."""
    bindings = {"planner_model": {**ROOMY, **(binding or {})}}
    engines, mapping = {"planner_model": engine}, {"planner": "planner_model", "solver": "planner_model"}
    return gateway_world(folder, engines, mapping=mapping, bindings=bindings, **spec)


def in_turn(texts, *answers, end=True):
    """Answers one after the other, whatever is asked."""
    left = [texts.ids(answer, end=end) for answer in answers]
    given: dict[tuple[int, ...], list[int]] = {}

    def script(prompt):
        key = (len(given), *prompt)
        return given.setdefault(key, left.pop(0))

    return script


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def conversation(folder, engine, turns, *, rewards=1.0, **spec):
    """Run the planner's ``turns(ask, world)`` and finalize; what it returned, the rows, and finalize's answer."""

    async def run():
        async with one_model(folder, engine, **spec) as world:
            client = world.client((await world.open(W))["planner"])

            async def ask(*messages, **kwargs):
                answer = await client.chat.completions.create(model="m", messages=list(messages), **kwargs)
                return answer.choices[0].message if kwargs.get("n", 1) == 1 else answer.choices

            result = await turns(ask, world)
            final = await world.control.finalize(W, rewards=rewards)
            return result, world.sink.rows, final

    return asyncio.run(run())


def sampled(row):
    return row.response_ids[row.response_mask == 1].tolist()
