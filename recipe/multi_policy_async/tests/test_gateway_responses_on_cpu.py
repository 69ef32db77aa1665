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
"""OpenAI's responses API with the real client, and the Agents SDK, which speaks it by default."""

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, gateway_world, one_model
from .fakes.tiny_model_folder import CHATML, make_model_folder

W = "e0-t0-s0-a0"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
ROOMY = {"max_prompt_length": 2048, "max_response_length": 1024, "max_model_len": 3072}


def in_turn(texts, *answers):
    seen: list[list[int]] = []

    def script(prompt):
        if prompt not in seen:
            seen.append(prompt)
        return texts.ids(answers[seen.index(prompt)])

    return script


def run_with(folder, engine, act, *, binding=None, **spec):
    async def run():
        bindings = {"planner_model": {**ROOMY, **(binding or {})}}
        async with one_model(folder, engine, bindings=bindings, **spec) as world:
            client = world.client((await world.open(W))["planner"])
            result = await act(client)
            await world.control.finalize(W, rewards=1.0)
            return result, world.sink.rows

    return asyncio.run(run())


def test_a_response_has_the_same_row_as_a_chat_completion(folder, texts):
    async def act(client):
        response = await client.responses.create(model="m", input="hello", instructions="Be brief.")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        await client.chat.completions.create(model="m", messages=messages)
        return response

    response, (ours, other) = run_with(folder, FakeEngine(texts.says("größer 😀")), act)
    assert (response.status, response.output_text) == ("completed", "größer 😀")
    assert response.usage.total_tokens == len(ours.prompt_ids) + len(ours.response_ids)
    assert ours.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert ours.response_ids.tolist() == other.response_ids.tolist()


@pytest.mark.parametrize("said", ["plain 😀", "I add. " + CALL, "", "<think>hm</think>"])
def test_a_streamed_response_accumulates_to_the_whole_one(folder, texts, said):
    async def act(client):
        whole = await client.responses.create(model="m", input="hello", tools=[TOOL])
        async with client.responses.stream(model="m", input="hello", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        return whole, kinds, final

    (whole, kinds, final), _ = run_with(folder, FakeEngine(texts.says(said)), act, binding={"split_reasoning": True})
    assert final.output_text == whole.output_text == said.split("</think>")[-1].split("<tool_call>")[0]
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)


def test_a_tool_loop_over_items_is_one_merged_row(folder, texts):
    async def act(client):
        items = [{"role": "user", "content": "1+2?"}]
        first = await client.responses.create(model="m", input=items, tools=[TOOL])
        call = next(item for item in first.output if item.type == "function_call")
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        return call, await client.responses.create(model="m", input=items, tools=[TOOL])

    said = ("I add. " + CALL, "It is 3.")
    (call, second), [row] = run_with(folder, FakeEngine(in_turn(texts, *said)), act, rows="merged")
    assert json.loads(call.arguments) == {"a": 1, "b": 2} and second.output_text == "It is 3."
    assert row.response_ids[row.response_mask == 1].tolist() == texts.ids(said[0]) + texts.ids(said[1])


def test_a_response_goes_on_from_an_earlier_one_by_its_id(folder, texts):
    async def act(client):
        first = await client.responses.create(model="m", input="one", instructions="Be brief.")
        second = await client.responses.create(
            model="m", input="two", instructions="Be brief.", previous_response_id=first.id
        )
        with pytest.raises(openai.NotFoundError, match="resp_other"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_other")
        return second.output_text

    text, [row] = run_with(folder, FakeEngine(in_turn(texts, "first", "second")), act, rows="merged")
    assert text == "second" and len(row.metadata["calls"]) == 2


def test_a_response_of_another_agent_is_a_404_that_tells_nothing_of_it(folder, texts):
    async def run():
        engines = {
            "planner_model": FakeEngine(texts.says("a secret plan")),
            "solver_model": FakeEngine(texts.says("42")),
        }
        async with gateway_world(folder, engines) as world:
            agents = await world.open(W)
            planner, solver = world.client(agents["planner"]), world.client(agents["solver"])
            plan = await planner.responses.create(model="m", input="plan")
            refused = []
            for response_id in (plan.id, plan.id.replace(":0", ":7")):
                with pytest.raises(openai.NotFoundError) as caught:
                    await solver.responses.create(model="m", input="x", previous_response_id=response_id)
                refused.append(str(caught.value).replace(response_id, "ID"))
            return refused, engines["solver_model"].requests

    (of_another, of_nobody), requests = asyncio.run(run())
    assert of_another == of_nobody and requests == []


def test_a_developer_message_is_carried_over_and_instructions_are_not(folder, texts):
    developer = {"role": "developer", "content": "Be brief."}

    async def act(client):
        first = await client.responses.create(model="m", input=[developer, {"role": "user", "content": "one"}])
        second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
        third = await client.responses.create(
            model="m", input="three", instructions="Be long.", previous_response_id=second.id
        )
        await client.responses.create(model="m", input="four", previous_response_id=third.id)

    _, rows = run_with(folder, FakeEngine(in_turn(texts, "1", "2", "3", "4")), act)
    prompts = [texts.tokenizer.decode(row.prompt_ids.tolist()) for row in rows]
    assert ["Be brief." in prompt for prompt in prompts] == [True] * 4
    assert ["Be long." in prompt for prompt in prompts] == [False, False, True, False]


def test_reasoning_belongs_to_the_answer_behind_it_be_that_a_message_or_a_call(tmp_path):
    thinking = CHATML.replace("+ (message.content", "+ (message.reasoning_content or '') + (message.content")
    folder = make_model_folder(tmp_path / "model", template=thinking)
    texts = Texts(folder)

    def reasoning(text):
        part = {"type": "reasoning_text", "text": text}
        return {"type": "reasoning", "id": "rs_0", "summary": [], "content": [part]}

    items = [
        {"role": "user", "content": "one"},
        reasoning("[I call]"),
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "two"},
        reasoning("[I say]"),
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "three"},
    ]
    _, [row] = run_with(
        folder, FakeEngine(texts.says("x")), lambda client: client.responses.create(model="m", input=items)
    )
    prompt = texts.tokenizer.decode(row.prompt_ids.tolist())
    assert "[I call]<tool_call>" in prompt and "\nthree" in prompt and "[I say]four" in prompt


@pytest.mark.parametrize("how", ["previous_response_id", "items"])
def test_of_equal_responses_the_one_whose_id_is_echoed_is_gone_on_with(folder, texts, how):
    async def act(client):
        _, second = [await client.responses.create(model="m", input="hello") for _ in range(2)]
        if how == "items":
            said = [item.model_dump(exclude_none=True) for item in second.output]
            history = [{"role": "user", "content": "hello"}, *said, {"role": "user", "content": "two"}]
            await client.responses.create(model="m", input=history)
        else:
            await client.responses.create(model="m", input="two", previous_response_id=second.id)

    _, rows = run_with(folder, FakeEngine(texts.says("same")), act, rows="merged")
    assert [[call["turn"] for call in row.metadata["calls"]] for row in rows] == [[0], [1, 2]]


FORM = {"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {},
            {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "truncation": "disabled"}
            | {"instructions": None, "previous_response_id": None, "max_output_tokens": None}
            | {"temperature": 1.0, "top_p": 1.0, "text": {"format": {"type": "text"}}},
        ),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [{**TOOL, "description": None}], "tool_choice": "none"}),
        ({"tools": [TOOL], "tool_choice": ALLOWED}, {"tool_choice": ALLOWED}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            {"tool_choice": {"type": "function", "name": "add"}},
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"max_output_tokens": 4, "instructions": "Be brief."}, {"max_output_tokens": 4, "instructions": "Be brief."}),
        ({"text": {"format": FORM}}, {"text": {"format": FORM}}),
        ({"temperature": 0.3, "top_p": 0.5}, {"temperature": 1.0, "top_p": 1.0}),  # the rollout config decides
    ],
)
def test_a_response_tells_what_was_asked_for_and_what_sampling_was_used(folder, texts, asked, told, stream):
    async def act(client):
        if not stream:
            raw = await client.responses.with_raw_response.create(model="m", input="x", **asked)
            return [raw.http_response.json()]
        events = await client.responses.create(model="m", input="x", stream=True, **asked)
        return [event.response.to_dict() async for event in events if hasattr(event, "response")]

    bodies, _ = run_with(folder, FakeEngine(texts.says("fine")), act, constrained="exclude")
    for body in bodies:
        Response.model_validate(body)
        assert {name: body[name] for name in told} == told


def test_a_response_goes_on_telling_from_which_one_and_keeps_the_clients_metadata(folder, texts):
    async def act(client):
        first = await client.responses.create(model="m", input="one", metadata={"step": "1", "agent_id": "me"})
        return first, await client.responses.create(model="m", input="two", previous_response_id=first.id)

    (first, second), _ = run_with(folder, FakeEngine(texts.says("fine")), act)
    assert second.previous_response_id == first.id and "step" not in second.metadata
    assert (first.metadata["step"], first.metadata["agent_id"]) == ("1", "planner")


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": "x", "metadata": {"a": 1}},
        {"input": "x", "tools": [{**TOOL, "parameters": 3}]},
        {"input": [{"type": "computer_call"}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "tool_choice": "required"},
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
    ],
)
def test_what_is_not_served_is_a_400(folder, texts, body):  # invariant 9
    async def act(client):
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", **body)
        return (await client.responses.create(model="m", input="x")).output_text

    assert run_with(folder, FakeEngine(texts.says("fine")), act)[0] == "fine"


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_the_agents_sdk_runs_a_tool_using_agent_unchanged(folder, texts, api):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    async def act(client):
        agents.set_tracing_disabled(True)
        models = {
            "responses": agents.OpenAIResponsesModel,
            "chat_completions": agents.OpenAIChatCompletionsModel,
        }
        model = models[api](model="planner", openai_client=client)
        agent = agents.Agent(name="Planner", instructions="Use the tool.", tools=[add], model=model)
        return (await agents.Runner.run(agent, "1+2?")).final_output

    said = ("I add. " + CALL, "It is 3.")
    text, [row] = run_with(folder, FakeEngine(in_turn(texts, *said)), act, rows="merged")
    assert text == "It is 3."
    assert row.response_ids[row.response_mask == 1].tolist() == texts.ids(said[0]) + texts.ids(said[1])
