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
"""JSON mode and forced tool calls: refused, or sampled under a grammar and kept out of training. Fakes: the engines."""

import asyncio
import json

import openai
import pytest

from ..gateway_binding_registry import ModelState
from ..trajectory import Version
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import anthropic_client, gateway_world

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "lookup", "description": "", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "lookup", "arguments": {"city": "Oslo"}}
CALL_SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": "lookup"}, "arguments": CITY},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "lookup"}}


def play(folder, script, scenario, **spec):
    """Run ``scenario(client, endpoint)`` as the planner; its result, the rows, and what the engine was sent."""

    async def run():
        engine = FakeEngine(script)
        mapping = {"planner": "planner_model"}
        async with gateway_world(folder, {"planner_model": engine}, mapping=mapping, **spec) as world:
            endpoint = (await world.open(W))["planner"]
            result = await scenario(world, world.client(endpoint), endpoint)
            await world.control.finalize(W, rewards=1.0)
            return result, world.sink.rows, engine.requests

    return asyncio.run(run())


def schemas(requests):
    return [json.loads(request["sampling_params"].get("json_schema", "null")) for request in requests]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}, CITY),
    ],
)
def test_a_json_format_is_sampled_under_its_schema_and_its_row_is_marked(folder, texts, form, schema):
    async def scenario(world, client, endpoint):
        free = await client.chat.completions.create(model="m", messages=ASK)
        bound = await client.chat.completions.create(model="m", messages=ASK, response_format=form)
        return free.choices[0].message.content, bound.choices[0].message.content

    said = '{"city": "Oslo"}'
    result, rows, requests = play(folder, texts.says(said), scenario, constrained="exclude")
    assert result == (said, said) and schemas(requests) == [None, schema]
    assert [row.metadata["constrained"] for row in rows] == [False, True]


@pytest.mark.parametrize("older", [False, True])
def test_a_json_format_of_anthropics_is_honoured_or_refused(folder, texts, older):
    form = {"type": "json_schema", "schema": CITY}
    more = {"extra_body": {"output_format": form}} if older else {"output_config": {"format": form}}

    async def scenario(world, client, endpoint):
        import anthropic

        async with anthropic_client(endpoint.anthropic_base_url) as sdk:
            try:
                answer = await sdk.messages.create(model="m", messages=ASK, max_tokens=64, **more)
            except anthropic.BadRequestError as error:
                return error.body["error"]["message"]
        return answer.content[0].text

    said = '{"city": "Oslo"}'
    result, [row], requests = play(folder, texts.says(said), scenario, constrained="exclude")
    assert result == said and schemas(requests) == [CITY] and row.metadata["constrained"]
    refusal, _, requests = play(folder, texts.says(said), scenario)
    assert "sampled under a grammar" in refusal and requests == []


async def by_chat(client, endpoint, choice):
    choice = {"any": "required", "named": NAMED}[choice]
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls
    return answer.choices[0].finish_reason, call.function.name, json.loads(call.function.arguments)


async def by_responses(client, endpoint, choice):
    choice = {"any": "required", "named": {"type": "function", "name": "lookup"}}[choice]
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    answer = await client.responses.create(model="m", input=ASK, tools=tools, tool_choice=choice)
    [call] = answer.output
    return "tool_calls", call.name, json.loads(call.arguments)


async def by_messages(client, endpoint, choice):
    choice = {"any": {"type": "any"}, "named": {"type": "tool", "name": "lookup"}}[choice]
    tools = [{"name": "lookup", "description": "", "input_schema": CITY}]
    async with anthropic_client(endpoint.anthropic_base_url) as sdk:
        answer = await sdk.messages.create(model="m", messages=ASK, max_tokens=64, tools=tools, tool_choice=choice)
    [call] = answer.content
    return {"tool_use": "tool_calls"}[answer.stop_reason], call.name, call.input


@pytest.mark.parametrize("choice", ["any", "named"])
@pytest.mark.parametrize("protocol", [by_chat, by_responses, by_messages])
def test_a_forced_call_is_sampled_as_one_in_every_protocol(folder, texts, protocol, choice):
    async def scenario(world, client, endpoint):
        return await protocol(client, endpoint, choice)

    result, [row], requests = play(folder, texts.says(json.dumps(CALL)), scenario, constrained="exclude")
    assert result == ("tool_calls", "lookup", {"city": "Oslo"})
    assert schemas(requests) == [CALL_SCHEMA] and row.metadata["constrained"]


OTHER = {"name": "forget", "parameters": {"type": "object"}}
FLAT = {"type": "allowed_tools", "tools": [{"type": "function", "name": "lookup"}]}


async def allowed_by_chat(client, mode):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    tools = [*TOOLS, {"type": "function", "function": OTHER}]
    await client.chat.completions.create(model="m", messages=ASK, tools=tools, tool_choice=choice)
    await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)


async def allowed_by_responses(client, mode):
    tools = [{"type": "function", "strict": False, **function} for function in (FUNCTION, OTHER)]
    await client.responses.create(model="m", input=ASK, tools=tools, tool_choice={**FLAT, "mode": mode})
    await client.responses.create(model="m", input=ASK, tools=tools[:1])


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("protocol", [allowed_by_chat, allowed_by_responses])
def test_allowed_tools_are_the_only_ones_that_the_model_sees_and_are_forced_only_if_required(
    folder, texts, protocol, mode
):
    async def scenario(world, client, endpoint):
        await protocol(client, mode)

    _, rows, requests = play(folder, texts.says(json.dumps(CALL)), scenario, constrained="exclude")
    allowed, only = (request["input_ids"] for request in requests)
    assert allowed == only and "lookup" in texts.tokenizer.decode(allowed)
    assert schemas(requests) == [CALL_SCHEMA if mode == "required" else None, None]
    assert [row.metadata["constrained"] for row in rows] == [mode == "required", False]


@pytest.mark.parametrize(("mode", "refused"), [("auto", False), ("required", True)])
def test_of_allowed_tools_only_the_required_ones_need_a_grammar(folder, texts, mode, refused):
    async def scenario(world, client, endpoint):
        try:
            await allowed_by_responses(client, mode)
        except openai.BadRequestError as error:
            return error.param
        return None

    assert play(folder, texts.says("x"), scenario)[0] == ("tool_choice" if refused else None)


def test_what_was_sampled_freely_around_a_forced_call_stays_in_rows_of_its_own(folder, texts):
    said = iter([texts.ids("hi"), texts.ids(json.dumps(CALL)), texts.ids("rain")])
    answers: dict[int, list[int]] = {}

    def script(prompt):
        return answers.setdefault(len(prompt), answers.get(len(prompt)) or next(said))

    async def scenario(world, client, endpoint):
        create = client.chat.completions.create
        history = [*ASK, (await create(model="m", messages=ASK)).choices[0].message.model_dump(exclude_none=True), *ASK]
        forced = await create(model="m", messages=history, tools=TOOLS, tool_choice="required")
        message = forced.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"}
        await create(model="m", messages=[*history, message, result])

    _, rows, _ = play(folder, script, scenario, constrained="exclude", rows="merged")
    assert [row.metadata["constrained"] for row in rows] == [False, True, False]
    assert [texts.tokenizer.decode(row.response_ids.tolist()) for row in rows] == ["hi", json.dumps(CALL), "rain"]
    assert all(row.response_mask.all() for row in rows)


def test_a_forced_call_that_was_cut_is_text(folder, texts):
    async def scenario(world, client, endpoint):
        ask = {"model": "m", "messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 10}
        return (await client.chat.completions.create(**ask)).choices[0]

    choice, _, _ = play(folder, texts.says(json.dumps(CALL)), scenario, constrained="exclude")
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", '{"name": "', None)


def test_a_constrained_call_that_a_sync_cuts_starts_again_since_the_grammar_is_the_engines(folder, texts):
    async def scenario(world, client, endpoint):
        engine = world.engines["planner_model"]
        engine.token_s = 0.005
        form = {"type": "json_object"}
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK, response_format=form))
        while not engine.running:
            await asyncio.sleep(0.002)
        await world.set_state("planner_model", ModelState.SYNCING)
        engine.abort_all()
        engine.token_s, engine.version = 0.0, "0.2"
        await world.set_state("planner_model", ModelState.OPEN, Version(0, 2))
        return (await call).choices[0].message.content

    text, [row], requests = play(folder, texts.says('{"a": 1}'), scenario, constrained="exclude")
    assert text == '{"a": 1}' and set(row.versions.tolist()) == {2}
    assert [request["input_ids"] for request in requests] == [row.prompt_ids.tolist()] * 2


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "only one"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice must be"),
        ({"tools": TOOLS, "tool_choice": {**FLAT, "mode": "none"}}, "tool_choice.mode"),
        ({"tools": TOOLS, "tool_choice": {**FLAT, "mode": "auto", "tools": []}}, "non-empty"),
        ({"tools": TOOLS, "tool_choice": {**FLAT, "mode": "auto", "tools": [{"type": "mcp"}]}}, "must be 'function'"),
        (
            {"tools": TOOLS, "tool_choice": {**FLAT, "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
            r"\['x'\]",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": ["function"]}}, "tool_choice of type"),
    ],
)
def test_what_no_grammar_can_be_made_of_is_a_400(folder, texts, more, names):
    async def scenario(world, client, endpoint):
        with pytest.raises(openai.BadRequestError, match=names):
            await client.chat.completions.create(model="m", messages=ASK, **more)

    assert play(folder, texts.says("x"), scenario, constrained="exclude") == (None, [], [])
