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
"""Histories: which rows a conversation becomes, with tools, branches, rewrites and choices."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from .fakes.conversation import W, assistant, conversation, in_turn, one_model, sampled, user
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts
from .fakes.tiny_model_folder import CHATML, make_model_folder

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# Spacing that no JSON encoder writes: encoding the parsed call again would give other ids.
CALL = '<tool_call>\n{"name":  "add", "arguments":{"a":1,"b" : 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), merges=(("a", "b"), ("ab", "c")))


async def two_turns(ask, world):
    first = await ask(user("one"))
    return await ask(user("one"), assistant(first.content), user("two"))


def test_a_growing_history_sends_the_sampled_ids_again_and_not_an_encoding_of_their_text(folder, texts):
    odd = [*texts.tokenizer.encode("a"), *texts.tokenizer.encode("b"), texts.end]  # "ab" would be one token
    assert odd[:-1] != texts.tokenizer.encode("ab")
    answers = [odd, texts.ids("fine")]
    engine = FakeEngine(lambda prompt: answers[0] if len(prompt) < 30 else answers[1])
    _, rows, _ = conversation(folder, engine, two_turns)
    first, second = rows
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + 3] == first.prompt_ids.tolist() + odd
    assert second.response_mask.all() and sampled(first) == odd


def test_merged_rows_hold_a_conversation_in_one_row_with_the_context_between_masked(folder, texts):  # invariant 1
    engine = FakeEngine(in_turn(texts, "first", "second"))
    _, [row], final = conversation(folder, engine, two_turns, rows="merged")
    between = texts.tokenizer.encode("\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert row.prompt_ids.tolist() == texts.prompt("one")
    assert row.response_ids.tolist() == texts.ids("first") + between + texts.ids("second")
    expected = [1] * len(texts.ids("first")) + [0] * len(between) + [1] * len(texts.ids("second"))
    assert row.response_mask.tolist() == expected
    assert [p == 0 for p in row.log_probs].count(False) > 0 and row.log_probs[row.response_mask == 0].tolist() == [
        0.0
    ] * len(between)
    assert set(row.versions[row.response_mask == 0].tolist()) == {-1}
    assert [call["request_id"] for call in row.metadata["calls"]] == [f"{W}:planner:0", f"{W}:planner:1"]
    assert final["trajectories"][0]["sampled_tokens"] == len(texts.ids("first") + texts.ids("second"))


def test_an_end_of_turn_that_the_template_added_is_masked(folder, texts):
    engine = FakeEngine(in_turn(texts, "a long first answer", "second"))

    async def turns(ask, world):
        first = await ask(user("one"), max_tokens=4)
        await ask(user("one"), assistant(first.content), user("two"))

    _, [row], _ = conversation(folder, engine, turns, rows="merged")
    cut = texts.ids("a long first answer")[:4]
    assert row.response_ids.tolist()[:5] == [*cut, texts.end]
    assert row.response_mask.tolist()[:5] == [1, 1, 1, 1, 0]
    assert [call["truncated"] for call in row.metadata["calls"]] == [True, False] and row.metadata["truncated"]


def test_a_tool_call_is_parsed_and_its_spacing_does_not_break_the_row(folder, texts):
    engine = FakeEngine(in_turn(texts, "I add. " + CALL, "3"))

    async def turns(ask, world):
        first = await ask(user("1+2?"), tools=[TOOL])
        call = first.tool_calls[0]
        echo = {"role": "assistant", "content": first.content, "tool_calls": [call.model_dump()]}
        echo["tool_calls"][0]["function"]["arguments"] = json.dumps({"b": 2, "a": 1}, indent=1)
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        return first, await ask(user("1+2?"), echo, result, tools=[TOOL])

    (first, second), [row], _ = conversation(folder, engine, turns, rows="merged")
    assert first.content == "I add. " and second.content == "3"
    function = first.tool_calls[0].function
    assert function.name == "add" and json.loads(function.arguments) == {"a": 1, "b": 2}
    assert sampled(row) == texts.ids("I add. " + CALL) + texts.ids("3")
    assert row.finish_reason == "stop" and row.metadata["calls"][0]["finish_reason"] == "tool_calls"


def test_a_streamed_tool_call_arrives_whole_and_its_markup_is_never_shown(folder, texts):
    async def run():
        engine = FakeEngine(texts.says("I add. " + CALL + CALL))
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"])
            stream = await client.chat.completions.create(model="m", messages=[user("1+2?")], tools=[TOOL], stream=True)
            return [chunk async for chunk in stream]

    chunks = asyncio.run(run())
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert content == "I add. "
    assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tools", [{"tools": [TOOL], "tool_choice": "none"}, {}])
def test_without_tools_on_offer_markup_is_text(folder, texts, tools):
    async def turns(ask, world):
        return await ask(user("x"), **tools)

    message, _, _ = conversation(folder, FakeEngine(texts.says(CALL)), turns)
    assert message.content == CALL and message.tool_calls is None


@pytest.mark.parametrize("call", ['{"name": add}', '{"name": "add", "arguments": {"a": NaN}}'])
def test_a_tool_call_that_does_not_parse_or_cannot_be_written_again_stays_text(folder, texts, call):
    broken = f"so: <tool_call>\n{call}\n</tool_call>"

    async def turns(ask, world):
        return await ask(user("x"), tools=[TOOL])

    message, [row], _ = conversation(folder, FakeEngine(texts.says(broken)), turns)
    assert message.content == broken and message.tool_calls is None and row.finish_reason == "stop"


def test_parallel_tool_calls_false_shows_one_call(folder, texts):
    async def turns(ask, world):
        return await ask(user("x"), tools=[TOOL], parallel_tool_calls=False)

    message, _, _ = conversation(folder, FakeEngine(texts.says(CALL + CALL)), turns)
    assert len(message.tool_calls) == 1


def test_a_rewritten_last_answer_is_superseded_and_the_row_rolls_back_to_before_it(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        history = [user("one"), assistant(first.content), user("two")]
        await ask(*history)
        await ask(*history, assistant("what the client says instead"), user("three"))

    engine = FakeEngine(in_turn(texts, "first", "second", "third"))
    _, [row], final = conversation(folder, engine, turns, rows="merged")
    assert sampled(row) == texts.ids("first") + texts.ids("third")
    assert "what the client says instead" in texts.tokenizer.decode(row.response_ids.tolist())
    assert final["calls"] == {"kept": 2, "abandoned(superseded)": 1}


def test_a_name_that_a_framework_puts_on_the_answer_does_not_break_the_row(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        await ask(user("one"), {**assistant(first.content), "name": "planner"}, user("two"))

    _, [row], _ = conversation(folder, FakeEngine(in_turn(texts, "first", "second")), turns, rows="merged")
    assert sampled(row) == texts.ids("first") + texts.ids("second")


def test_white_space_that_the_client_trims_starts_a_row_but_drops_nothing(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        await ask(user("one"), assistant(first.content.strip()), user("two"))

    _, rows, final = conversation(folder, FakeEngine(in_turn(texts, "first \n", "second")), turns, rows="merged")
    assert [sampled(row) for row in rows] == [texts.ids("first \n"), texts.ids("second")]
    assert final["calls"] == {"kept": 2}


def test_branches_share_their_beginning_but_each_sampled_token_is_trained_once(folder, texts):  # invariant 2
    async def turns(ask, world):
        first = await ask(user("one"))
        await ask(user("one"), assistant(first.content), user("left"))
        await ask(user("one"), assistant(first.content), user("right"))

    engine = FakeEngine(in_turn(texts, "first", "L", "R"))
    _, rows, _ = conversation(folder, engine, turns, rows="merged")
    assert [sampled(row) for row in rows] == [texts.ids("first") + texts.ids("L"), texts.ids("R")]
    assert rows[1].prompt_ids.tolist()[: len(rows[0].prompt_ids) + 6] == rows[0].prompt_ids.tolist() + texts.ids(
        "first"
    )


def test_a_changed_history_begins_a_new_row(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        await ask(user("a summary of what was said"), assistant(first.content), user("two"))

    engine = FakeEngine(in_turn(texts, "first", "second"))
    _, rows, final = conversation(folder, engine, turns, rows="merged")
    assert [sampled(row) for row in rows] == [texts.ids("first"), texts.ids("second")]
    assert final["calls"] == {"kept": 2}


def test_changed_tool_schemas_change_the_prompt_and_begin_a_new_row(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        await ask(user("one"), assistant(first.content), user("two"), tools=[TOOL])

    _, rows, _ = conversation(folder, FakeEngine(in_turn(texts, "first", "second")), turns, rows="merged")
    assert [sampled(row) for row in rows] == [texts.ids("first"), texts.ids("second")]


def test_a_template_that_strips_earlier_thinking_gets_a_row_per_turn(tmp_path):
    stripping = CHATML.replace(
        "(message.content or '')",
        "(message.content.split('</think>')[-1] if message.role == 'assistant' else message.content)",
    )
    folder = make_model_folder(tmp_path / "model", template=stripping)
    texts = Texts(folder)
    engine = FakeEngine(in_turn(texts, "<think>hm</think>first", "second"))

    async def turns(ask, world):
        first = await ask(user("one"))
        assert first.content == "first" and first.reasoning_content == "hm"
        return await ask(user("one"), assistant(first.content), user("two"))

    binding = {"split_reasoning": True}
    _, rows, final = conversation(folder, engine, turns, rows="merged", binding=binding)
    assert [sampled(row) for row in rows] == [texts.ids("<think>hm</think>first"), texts.ids("second")]
    assert final["calls"] == {"kept": 2}
    assert "hm" not in texts.tokenizer.decode(rows[1].prompt_ids.tolist())


def test_content_in_parts_is_the_same_message_as_the_same_content_in_a_string(folder, texts):
    async def turns(ask, world):
        first = await ask(user("one"))
        parts = [{"type": "text", "text": first.content}]
        await ask({"role": "user", "content": [{"type": "text", "text": "one"}]}, assistant(parts), user("two"))

    _, rows, _ = conversation(folder, FakeEngine(in_turn(texts, "first", "second")), turns, rows="merged")
    assert len(rows) == 1


def test_a_row_ends_before_the_turn_that_does_not_fit_and_no_turn_is_lost(folder, texts):
    async def turns(ask, world):
        history = [user("one")]
        for _ in range(4):
            answer = await ask(*history)
            history += [assistant(answer.content), user("go on")]

    engine = FakeEngine(in_turn(texts, *(f"answer {i} which is long" for i in range(4))))
    binding = {"max_response_length": 100, "max_model_len": 1124}
    _, rows, final = conversation(folder, engine, turns, rows="merged", binding=binding)
    assert [len(row.metadata["calls"]) for row in rows] == [2, 2]
    assert all(len(row.response_ids) <= 100 for row in rows) and final["calls"] == {"kept": 4}


def test_a_conversation_that_outgrew_the_longest_prompt_goes_on_behind_its_rows_prompt(folder, texts):
    binding = {"max_prompt_length": 40, "max_response_length": 120, "max_model_len": 160}

    async def turns(ask, world):
        history, answers = [user("one")], 0
        while True:
            try:
                answer = await ask(*history)
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
                return answers
            answers += 1
            history += [assistant(answer.content), user("go on")]

    engine = FakeEngine(in_turn(texts, *(f"answer {i}" for i in range(9))))
    answers, [row], final = conversation(folder, engine, turns, rows="merged", binding=binding)
    assert answers >= 2 and len(row.metadata["calls"]) == answers and final["calls"] == {"kept": answers}
    assert len(row.prompt_ids) <= 40 and len(row.response_ids) <= 120


def test_of_several_choices_the_one_that_the_client_goes_on_with_is_kept(folder, texts):
    async def turns(ask, world):
        choices = await ask(user("one"), n=3)
        assert [choice.index for choice in choices] == [0, 1, 2]
        chosen = next(choice for choice in choices if choice.message.content == "B")
        return await ask(user("one"), assistant(chosen.message.content), user("two"))

    engine = FakeEngine(in_turn(texts, "A", "B", "C", "done"))
    _, rows, final = conversation(folder, engine, turns, rows="merged")
    assert [sampled(row) for row in rows] == [texts.ids("B") + texts.ids("done")]
    assert final["calls"] == {"kept": 2, "abandoned(unchosen)": 2}
    assert len({request["rid"] for request in engine.requests}) == 4  # n single requests, never n > 1


def test_choices_that_the_rewards_name_are_all_kept(folder, texts):
    async def turns(ask, world):
        await ask(user("one"), n=3)

    engine = FakeEngine(in_turn(texts, "A", "B", "C"))
    rewards = {f"{W}:planner:0": 1.0, f"{W}:planner:0:2": 0.5}
    _, rows, final = conversation(folder, engine, turns, rewards=rewards)
    assert [(row.request_id, row.reward) for row in rows] == list(rewards.items())
    assert final["calls"] == {"kept": 2, "abandoned(unchosen)": 1}


def test_equal_choices_are_told_apart_by_the_tool_call_id_that_the_client_echoes(folder, texts):
    async def turns(ask, world):
        choices = await ask(user("one"), n=2, tools=[TOOL])
        message = choices[1].message
        echo = {"role": "assistant", "content": None, "tool_calls": [c.model_dump() for c in message.tool_calls]}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        return await ask(user("one"), echo, result, tools=[TOOL])

    engine = FakeEngine(in_turn(texts, CALL, CALL, "done"))
    _, [row], _ = conversation(folder, engine, turns, rows="merged")
    assert [call["request_id"] for call in row.metadata["calls"]] == [f"{W}:planner:0:1", f"{W}:planner:1"]


def test_a_later_request_keeps_an_answer_whose_delivery_was_not_seen(folder, texts):
    async def run():
        engine = FakeEngine(in_turn(texts, "first", "second"))
        async with one_model(folder, engine) as world:
            client = world.client((await world.open(W))["planner"])
            stream = await client.chat.completions.create(model="m", messages=[user("one")], stream=True)
            async for chunk in stream:  # leaves without the last bytes, but with the whole text
                if chunk.choices[0].delta.content == "t":
                    break
            await stream.close()
            await asyncio.sleep(0.05)
            history = [user("one"), assistant("first"), user("two")]
            await client.chat.completions.create(model="m", messages=history)
            return (await world.control.finalize(W, rewards=1.0))["calls"]

    assert asyncio.run(run()) == {"kept": 2}
