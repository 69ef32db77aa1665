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
"""OpenAI's completions: text or token ids in, captured like chat. Fakes: the engines."""

import asyncio

import openai
import pytest

from .fakes.fake_engine import FakeEngine, log_prob_of
from .fakes.gateway_world import gateway_world

W = "e0-t0-s0-a0"


def play(folder, texts, scenario, *, script=None, rewards=1.0, **spec):
    """Run ``scenario(client)`` as the planner; its result, the rows and what the engine was sent."""

    async def run():
        engines = {"planner_model": FakeEngine(script or texts.echoes())}
        async with gateway_world(folder, engines, mapping={"planner": "planner_model"}, **spec) as world:
            client = world.client((await world.open(W))["planner"])
            result = await scenario(client.completions)
            await world.control.finalize(W, rewards=rewards)
            return result, world.sink.rows, engines["planner_model"].requests

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_sent_as_it_stands_and_its_answer_is_captured_exactly(folder, texts, stream, as_ids):  # invariant 1
    text = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"  # a template written by hand
    ids = texts.tokenizer.encode(text)

    async def scenario(completions):
        answer = await completions.create(model="m", prompt=ids if as_ids else text, max_tokens=50, stream=stream)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason
        chunks = [chunk async for chunk in answer]
        assert all(chunk.object == "text_completion" for chunk in chunks)
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason

    result, [row], [sent] = play(folder, texts, scenario)
    said = texts.echoes()(ids)
    assert result == (f"{sum(ids) % 9973}:{len(ids)}", "stop")
    assert sent["input_ids"] == row.prompt_ids.tolist() == ids
    assert row.response_ids.tolist() == said and row.response_mask.all()
    assert row.log_probs.tolist() == [log_prob_of(token) for token in said]


def test_every_prompt_of_a_list_is_answered_in_order_and_gives_a_row_of_its_own(folder, texts):
    prompts = ["one", "three", "a"]

    async def scenario(completions):
        return await completions.create(model="m", prompt=prompts)

    answer, rows, _ = play(folder, texts, scenario)
    encoded = [texts.tokenizer.encode(prompt) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [f"{sum(ids) % 9973}:{len(ids)}" for ids in encoded]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [row.prompt_ids.tolist() for row in rows] == encoded
    assert answer.usage.prompt_tokens == sum(map(len, encoded))


@pytest.mark.parametrize("as_ids", [False, True])
def test_of_several_choices_the_one_that_a_later_prompt_goes_on_from_is_kept(folder, texts, as_ids):
    calls = iter(range(10))
    answers = [texts.ids(text, end=False) + texts.ids(".") for text in ("red", "green", "blue", "end")]

    async def scenario(completions):
        ids = texts.tokenizer.encode("say ")
        first = await completions.create(model="m", prompt=ids if as_ids else "say ", n=3)
        number = next(i for i, choice in enumerate(first.choices) if choice.text == "green.")
        going_on = "say green. and"
        await completions.create(
            model="m", prompt=[*ids, *answers[1], *texts.tokenizer.encode(" and")] if as_ids else going_on
        )
        return number

    number, rows, _ = play(folder, texts, scenario, script=lambda prompt: answers[next(calls)])
    assert [row.response_ids.tolist() for row in rows] == [answers[1], answers[3]]
    assert rows[0].metadata["calls"][0]["choice"] == number


def test_merged_rows_join_completions_whose_ids_go_on_from_each_other(folder, texts):
    said = {3: texts.ids("ab", end=False), 10: texts.ids("cd")}

    async def scenario(completions):
        first = texts.tokenizer.encode("one")
        await completions.create(model="m", prompt=first, max_tokens=2)
        await completions.create(model="m", prompt=[*first, *said[3], *texts.tokenizer.encode(" tool")])

    script = {3: said[3] + texts.ids(""), 10: said[10]}
    _, [row], _ = play(folder, texts, scenario, script=lambda prompt: script[len(prompt)], rows="merged")
    between = texts.tokenizer.encode(" tool")
    assert row.response_ids.tolist() == said[3] + between + said[10]
    assert row.response_mask.tolist() == [1, 1] + [0] * len(between) + [1, 1, 1]


def test_log_probs_come_in_the_legacy_shape(folder, texts):
    async def scenario(completions):
        whole = await completions.create(model="m", prompt="x", logprobs=2)
        stream = await completions.create(model="m", prompt="x", logprobs=0, stream=True)
        return whole.choices[0].logprobs, [chunk.choices[0].logprobs async for chunk in stream]

    (whole, chunks), [row, _], _ = play(folder, texts, scenario, script=texts.says("ok"))
    assert whole.tokens == ["o", "k", "<|im_end|>"] and whole.text_offset == [0, 1, 2]
    assert whole.token_logprobs == row.log_probs.tolist()
    assert [len(top) for top in whole.top_logprobs] == [2, 2, 2] and "o" in whole.top_logprobs[0]
    assert sum((chunk.token_logprobs for chunk in chunks), []) == whole.token_logprobs
    assert sum((chunk.text_offset for chunk in chunks), []) == whole.text_offset


def test_a_stop_string_a_budget_and_usage_are_as_openai_gives_them(folder, texts):
    async def scenario(completions):
        stopped = await completions.create(model="m", prompt="x", stop="END")
        cut = await completions.create(model="m", prompt="x")  # 16 tokens, says OpenAI
        stream = await completions.create(model="m", prompt="x", stream=True, stream_options={"include_usage": True})
        return stopped.choices[0], cut.choices[0], [chunk async for chunk in stream][-1]

    said = "yes END " + "z" * 30
    (stopped, cut, last), rows, _ = play(folder, texts, scenario, script=texts.says(said))
    assert (stopped.text, stopped.finish_reason) == ("yes ", "stop")
    assert (cut.text, cut.finish_reason) == (said[:16], "length")
    assert last.choices == [] and last.usage.completion_tokens == 16
    assert [len(row.response_ids) for row in rows] == [len("yes END"), 16, 16]


FAULTS = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"prompt": [1, "x"]}, r"prompt\[1\]"),
    ({"prompt": [[-1]]}, r"prompt\[0\]\[0\]"),
    ({"prompt": [100_000]}, "token ids of this model are below"),
    ({"prompt": [None]}, r"prompt\[0\]"),
    ({"prompt": ["x"] * 9, "n": 2}, "at most 16 answers"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "logprobs": 6}, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x" * 600}, "600 tokens"),
]


def test_what_cannot_be_served_is_a_400_and_the_session_lives_on(folder, texts):
    async def scenario(completions):
        for body, names in FAULTS:
            with pytest.raises(openai.BadRequestError, match=names):
                await completions.create(**{"model": "m", "prompt": None, **body})
        return (await completions.create(model="m", prompt="x")).choices[0].text

    text, rows, _ = play(folder, texts, scenario, script=texts.says("ok"))
    assert text == "ok" and len(rows) == 1
