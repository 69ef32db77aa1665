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
"""An assistant message that is not the answer sampled in its place: a rewritten answer, or words from elsewhere?"""

import openai
import pytest

from .fakes.conversation import W, assistant, conversation, in_turn, sampled, user
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts
from .fakes.tiny_model_folder import CHATML, make_model_folder

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STRIPPING = CHATML.replace("(message.content or '')", "(message.content or '').split('</think>')[-1]")


async def by_another_agent(ask, world):
    solver = world.client((await world.open(W))["solver"])
    answer = await solver.chat.completions.create(model="m", messages=[user("one")], tools=[TOOL])
    return answer.choices[0].message


async def by_another_conversation(ask, world):
    return await ask(user("something else"), tools=[TOOL])


async def by_a_completion(ask, world):
    solver = world.client((await world.open(W))["solver"])
    answer = await solver.completions.create(model="m", prompt="say", max_tokens=100)
    return openai.types.chat.ChatCompletionMessage(role="assistant", content=answer.choices[0].text)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("said_elsewhere", "text"),
    [
        (by_another_agent, "what the other said \n"),
        (by_another_agent, CALL),
        (by_another_conversation, "what it said before"),
        (by_a_completion, "what a completion said"),
    ],
)
def test_words_that_a_call_of_the_workflow_said_rewrite_nothing(folder, texts, said_elsewhere, text, before):
    async def turns(ask, world):
        other = await said_elsewhere(ask, world) if before else None
        await ask(user("one"))
        other = other or await said_elsewhere(ask, world)
        message = {"role": "assistant", "content": (other.content or "").strip()}  # as frameworks do
        if other.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in other.tool_calls]
        await ask(user("one"), message, user("two"))

    said = [text, "first"] if before else ["first", text]
    _, rows, final = conversation(folder, FakeEngine(in_turn(texts, *said, "second")), turns, rows="merged")
    assert final["calls"] == {"kept": 3}
    assert sorted(map(sampled, rows)) == sorted(texts.ids(words) for words in (*said, "second"))


async def rewriting(ask):
    """An answer, a second one, and what the client says instead of that; the history up to the second answer."""
    first = await ask(user("one"))
    history = [user("one"), assistant(first.content), user("two")]
    second = await ask(*history)
    await ask(*history, assistant("instead"), user("three"))
    return [*history, assistant(second.content)]


@pytest.mark.parametrize("mode", ["merged", "per_call"])
def test_an_answer_that_the_client_returns_to_was_not_rewritten(folder, texts, mode):
    async def turns(ask, world):
        await ask(*await rewriting(ask), user("four"))

    engine = FakeEngine(in_turn(texts, "first", "second", "third", "fourth"))
    _, rows, final = conversation(folder, engine, turns, rows=mode)
    assert final["calls"] == {"kept": 4}
    merged = [texts.ids("first") + texts.ids("second") + texts.ids("fourth"), texts.ids("third")]
    alone = [texts.ids(words) for words in ("first", "second", "third", "fourth")]
    assert [sampled(row) for row in rows] == (merged if mode == "merged" else alone)


def test_an_answer_equal_to_a_rewritten_one_is_the_one_that_is_gone_on_from(folder, texts):
    async def turns(ask, world):
        await ask(user("one"))
        await ask(user("one"), assistant("instead"), user("two"))
        await ask(user("one"))
        await ask(user("one"), assistant("same"), user("two"))

    engine = FakeEngine(in_turn(texts, "same", "second", "same", "third"))
    _, rows, final = conversation(folder, engine, turns, rows="merged")
    assert final["calls"] == {"kept": 3, "abandoned(superseded)": 1}
    assert [row.turn for row in rows] == [1, 2]


def test_each_of_several_attempts_can_be_rewritten(folder, texts):
    async def turns(ask, world):
        for _ in range(2):
            await ask(user("one"))
            await ask(user("one"), assistant("instead"), user("two"))

    engine = FakeEngine(in_turn(texts, "first", "second", "third", "fourth"))
    _, rows, final = conversation(folder, engine, turns)
    assert final["calls"] == {"kept": 2, "abandoned(superseded)": 2}
    assert [row.turn for row in rows] == [1, 3]


def test_a_rewritten_answer_that_the_rewards_name_is_kept(folder, texts):
    async def turns(ask, world):
        await rewriting(ask)

    rewards = {f"{W}:planner:{turn}": turn / 4 for turn in range(3)}
    engine = FakeEngine(in_turn(texts, "first", "second", "third"))
    _, rows, final = conversation(folder, engine, turns, rewards=rewards)
    assert final["calls"] == {"kept": 3} and {row.request_id: row.reward for row in rows} == rewards


def test_a_rewritten_answer_is_counted_with_its_tokens_when_the_workflow_ends(folder, texts):
    async def turns(ask, world):
        await rewriting(ask)
        counted.append(world.metric("sampled_tokens_total", model="planner_model", outcome="superseded"))
        worlds.append(world)

    counted, worlds = [], []
    engine = FakeEngine(in_turn(texts, "first", "second", "third"))
    _, _, final = conversation(folder, engine, turns)
    counted.append(worlds[0].metric("sampled_tokens_total", model="planner_model", outcome="superseded"))
    assert counted == [0, len(texts.ids("second"))]
    assert final["calls"] == {"kept": 2, "abandoned(superseded)": 1}


def test_a_rewritten_answer_that_fits_behind_its_row_only_is_not_returned_to(folder, texts):
    binding = {"max_prompt_length": 60, "max_response_length": 200, "max_model_len": 260}

    async def turns(ask, world):
        history = await rewriting(ask)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(*history, user("four"))
        assert caught.value.code == "context_length_exceeded"

    engine = FakeEngine(in_turn(texts, "first answer, a long one", "second", "third"))
    _, [row], final = conversation(folder, engine, turns, rows="merged", binding=binding)
    assert sampled(row) == texts.ids("first answer, a long one") + texts.ids("third")
    assert final["calls"] == {"kept": 2, "abandoned(superseded)": 1}


async def by_a_template(ask):
    return await ask(user("one")), [user("one")]


async def behind_an_earlier_answer(ask):
    """As white space is trimmed, the row that goes on is that of the answer before."""
    history = [user("zero"), assistant((await ask(user("zero"))).content), user("one")]
    return await ask(*history), history


@pytest.mark.parametrize("where", [by_a_template, behind_an_earlier_answer])
def test_an_answer_that_was_gone_on_from_outside_its_row_stays(tmp_path, where):
    model = make_model_folder(tmp_path / "model", template=STRIPPING if where is by_a_template else CHATML)

    async def turns(ask, world):
        answer, history = await where(ask)
        await ask(*history, assistant(answer.content.strip()), user("two"))
        await ask(*history, assistant("instead"), user("two"))

    said = ["zero"] * (where is behind_an_earlier_answer) + ["<think>hm</think>first \n", "second", "third"]
    engine = FakeEngine(in_turn(Texts(model), *said))
    _, _, final = conversation(model, engine, turns, binding={"split_reasoning": True}, rows="merged")
    assert final["calls"] == {"kept": len(said)}
