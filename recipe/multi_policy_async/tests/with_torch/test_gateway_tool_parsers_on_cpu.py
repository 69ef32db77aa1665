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
"""Each tool parser that a config may name, on an answer in its family's format. Fakes: the engines."""

import asyncio
import json

import openai
import pytest

from ..fakes.fake_engine import FakeEngine
from ..fakes.gateway_world import Texts, one_model
from ..fakes.tiny_model_folder import make_model_folder

pytestmark = pytest.mark.slow

pytest.importorskip("verl.experimental.agent_loop.tool_parser")  # here: it takes longer than a client waits

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "weather?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
XML = "<function=lookup>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>"
ARGUMENTS = '{"city": "Oslo", "days": 5}'
# Family -> its answer, its markers that are special tokens, the one that ends its turn (else the model's own).
FAMILIES = {
    "hermes": (f'<tool_call>\n{{"name": "lookup", "arguments": {ARGUMENTS}}}\n</tool_call>', (), None),
    "model": (f"[CALL]lookup|{ARGUMENTS}[/CALL]", ("[CALL]", "[/CALL]"), None),
    "qwen3_coder": (f"<tool_call>\n{XML}\n</tool_call>", (), None),
    "glm": (
        "<tool_call>lookup\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call><|observation|>",
        ("<|observation|>",),
        "<|observation|>",
    ),
    "seed": (
        "<seed:tool_call>\n<function=lookup>\n<parameter=city>Oslo</parameter>\n<parameter=days>5</parameter>\n"
        "</function>\n</seed:tool_call>",
        (),
        None,
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="lookup">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">5</parameter>\n</invoke>\n</minimax:tool_call>',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        None,
    ),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        tuple(f"<|tool_call{part}|>" for part in ("s_section_begin", "_begin", "_argument_begin", "_end"))
        + ("<|tool_calls_section_end|>",),
        None,
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="lookup">\n<｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ("｜DSML｜",),
        None,
    ),
    "gemma4": (
        '<|tool_call>call:lookup{city:<|"|>Oslo<|"|>,days:5}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        "<tool_call|>",
    ),
}
MODEL_SCHEMA = {
    "type": "object",
    "properties": {
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"\[CALL\](.*?)\[/CALL\]",
            "items": {
                "type": "object",
                "x-regex": r"(?P<name>\w+)\|(?P<arguments>.*)",
                "properties": {"name": {"type": "string"}, "arguments": {"type": "object", "x-parser": "json"}},
            },
        }
    },
}


def folder_of(path, family):
    more = {"response_schema": MODEL_SCHEMA} if family == "model" else {"tokenizer_class": "PreTrainedTokenizerFast"}
    return make_model_folder(path / family.replace("-", "_"), special=FAMILIES.get(family, ("", (), None))[1], **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tool_call_of_a_family_is_read_streamed_and_extended_token_exactly(tmp_path, family):
    said, _, stop = FAMILIES[family]
    folder = folder_of(tmp_path, family)
    texts = Texts(folder)
    ids = texts.ids(f"As 1 < 2: {said}", end=stop is None)
    later = texts.ids("Rain.")
    goes_on = {"model": "m", "tools": [TOOL]}

    def answer(prompt):
        called = any(prompt[start : start + len(ids)] == ids for start in range(len(prompt)))
        return later if called else ids

    async def run():
        engine = FakeEngine(answer)
        room = {"max_prompt_length": 2000, "max_response_length": 1000, "max_model_len": 3000}
        changes = {"planner_model": {"tool_parser": family, **room}}
        async with one_model(folder, engine, bindings=changes, rows="merged") as world:
            client = world.client((await world.open(W))["planner"])
            first = (await client.chat.completions.create(messages=ASK, **goes_on)).choices[0]
            stream = await client.chat.completions.create(messages=ASK, stream=True, **goes_on)
            chunks = [chunk.choices[0].delta async for chunk in stream]
            result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "wet"}
            history = [*ASK, first.message.model_dump(exclude_none=True), result]
            second = (await client.chat.completions.create(messages=history, **goes_on)).choices[0]
            await world.control.finalize(W, rewards=1.0)
            return first, chunks, second, world.sink.rows, engine.requests

    first, chunks, second, rows, requests = asyncio.run(run())
    [call] = first.message.tool_calls
    assert (first.finish_reason, call.function.name) == ("tool_calls", "lookup")
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 5}
    assert first.message.content.strip() == "As 1 < 2:"
    streamed = [call for chunk in chunks for call in chunk.tool_calls or []]
    assert [call.function.name for call in streamed] == ["lookup"]
    assert "".join(chunk.content or "" for chunk in chunks) == first.message.content
    assert second.message.content == "Rain."
    assert ids[-1] in requests[0]["sampling_params"]["stop_token_ids"]
    merged = next(row for row in rows if not row.response_mask.all())
    assert merged.response_ids[merged.response_mask == 1].tolist() == ids + later


@pytest.mark.parametrize(("family", "why"), [("gpt-oss", "not served"), ("nobody", "Unknown tool parser")])
def test_a_parser_that_cannot_be_had_refuses_tools_and_nothing_else(tmp_path, family, why):
    folder = folder_of(tmp_path, family)
    texts = Texts(folder)

    async def run():
        engine = FakeEngine(texts.says("hello"))
        changes = {"planner_model": {"tool_parser": family}}
        async with one_model(folder, engine, bindings=changes) as world:
            client = world.client((await world.open(W))["planner"])
            with pytest.raises(openai.BadRequestError, match=why):
                await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
            return (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message.content

    assert asyncio.run(run()) == "hello"


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_is_split_off_whether_its_markers_are_special_tokens_or_text(tmp_path, special):
    markers = ("<|open|>",)
    folder = make_model_folder(tmp_path / "model", special=("<think>", "</think>") if special else markers)
    texts = Texts(folder)

    async def run():
        engine = FakeEngine(texts.says("<think>\nhm</think>\n\nyes"))
        changes = {"planner_model": {"split_reasoning": True}}
        async with one_model(folder, engine, bindings=changes) as world:
            client = world.client((await world.open(W))["planner"])
            return (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message

    message = asyncio.run(run())
    assert (message.reasoning_content, message.content) == ("hm", "yes")
