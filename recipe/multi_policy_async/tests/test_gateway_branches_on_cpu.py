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

import pytest

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, one_model, until
from .fakes.tiny_model_folder import CHATML, make_model_folder

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


STRIPPING = CHATML.replace(
    "(message.content or '')",
    "(message.content.split('</think>')[-1] if message.role == 'assistant' else message.content)",
)


@pytest.mark.parametrize(
    ("template", "said", "kwargs"),
    [
        (CHATML, "answer {}END", {"stop": ["END"]}),
        (STRIPPING, "<think>hm</think>answer {}", {}),
        (CHATML, "answer {}\n", {}),
    ],
    ids=["cut by a stop string", "the template strips thinking", "the client strips white space"],
)
@pytest.mark.parametrize("rows", ["per_call", "merged"])
def test_of_several_choices_the_chosen_one_is_kept_also_where_its_row_cannot_be_extended(
    tmp_path, template, said, kwargs, rows
):
    folder = make_model_folder(tmp_path / "model", template=template)
    texts = Texts(folder)
    left = ["before", said.format(0), said.format(1), "end"]
    given: dict[int, list[int]] = {}

    def script(prompt):
        return given.setdefault(len(given), texts.ids(left.pop(0)))

    async def run():
        binding = {"planner_model": {"split_reasoning": True}}
        async with one_model(folder, FakeEngine(script), bindings=binding, rows=rows) as world:
            client = world.client((await world.open(W))["planner"])
            await client.chat.completions.create(model="m", messages=[user("p")])
            history = [user("p"), assistant("before"), user("q")]
            first = await client.chat.completions.create(model="m", messages=history, n=2, **kwargs)
            chosen = first.choices[1].message.content.strip()
            history += [assistant(chosen), user("go on")]
            await client.chat.completions.create(model="m", messages=history)
            return chosen, (await world.control.finalize(W, rewards=1.0))["calls"], world.sink.rows

    chosen, calls, trained = asyncio.run(run())
    assert chosen in ("answer 0", "answer 1") and calls == {"kept": 3, "abandoned(unchosen)": 1}
    assert "".join(sampled(texts, row) for row in trained) == "before" + said.format(chosen[-1]) + "end"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
STRICT = CHATML.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{- raise_exception('a tool result without a call') }}{%- endif %}",
)


def test_a_template_that_takes_tool_results_only_behind_calls_gets_a_row_per_turn(tmp_path):
    folder = make_model_folder(tmp_path / "model", template=STRICT)
    texts = Texts(folder)

    def script(prompt):
        return texts.ids(CALL if len(engine.requests) == 1 else "3")

    engine = FakeEngine(script)

    async def run():
        async with one_model(folder, engine, rows="merged") as world:
            client = world.client((await world.open(W))["planner"])
            first = await client.chat.completions.create(model="m", messages=[user("q")], tools=[TOOL])
            answer = first.choices[0].message.to_dict()
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
            await client.chat.completions.create(model="m", messages=[user("q"), answer, result], tools=[TOOL])
            return (await world.control.finalize(W, rewards=1.0))["calls"], world.sink.rows

    calls, rows = asyncio.run(run())
    assert calls == {"kept": 2} and [sampled(texts, row) for row in rows] == [CALL, "3"]
