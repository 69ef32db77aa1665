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
"""Which earlier answers a request keeps alive, also where it cannot extend their row."""

import asyncio

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import one_model, until

W = "e0-t0-s0-a0"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def sampled(texts, row):
    return texts.tokenizer.decode(row.response_ids[row.response_mask.astype(bool)].tolist())


def test_an_answer_from_which_another_branch_goes_on_is_not_superseded(folder, texts):  # invariant 2
    said = {"q": "first", "1": "never read to its end" * 9, "2": "branch", "3": "other"}

    def script(prompt):
        asked = texts.tokenizer.decode(prompt, skip_special_tokens=False).split("user\n")[-1]
        return texts.ids(said[asked.split("<|im_end|>")[0]])

    async def run():
        engine = FakeEngine(script, token_s=0.01)
        async with one_model(folder, engine, rows="merged", retry_grace_s=0.01) as world:
            client = world.client((await world.open(W))["planner"])

            async def ask(*messages, **kwargs):
                return await client.chat.completions.create(model="m", messages=list(messages), **kwargs)

            await ask(user("q"))
            stream = await ask(user("q"), assistant("first"), user("1"), stream=True)
            async for _ in stream:
                break
            await ask(user("q"), assistant("first"), user("2"))
            await stream.close()
            await until(lambda: world.gateway.sessions.find(W).status()["calls"].get("abandoned(client_gone)"))
            await ask(user("q"), assistant("an answer of another model"), user("3"))
            return (await world.control.finalize(W, rewards=1.0))["calls"], world.sink.rows

    calls, rows = asyncio.run(run())
    assert calls == {"kept": 3, "abandoned(client_gone)": 1}
    assert [sampled(texts, row) for row in rows] == ["firstbranch", "other"]
