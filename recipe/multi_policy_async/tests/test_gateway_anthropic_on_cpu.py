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
"""The real anthropic client against the real gateway, over loopback."""

import asyncio

import pytest

from ..gateway_binding_registry import ModelState
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, anthropic_client, one_model
from .fakes.tiny_model_folder import make_model_folder

W = "e0-t0-s0-a0"
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ROOMY = {"max_prompt_length": 1024, "max_response_length": 512, "max_model_len": 1536}


def run_with(folder, engine, act, *, binding=None, **spec):
    """Run ``act(client, world)`` with a client bound to the planner's URL."""

    async def run():
        bindings = {"planner_model": {**ROOMY, **(binding or {})}}
        async with one_model(folder, engine, bindings=bindings, **spec) as world:
            url = (await world.open(W))["planner"].anthropic_base_url
            async with anthropic_client(url) as client:
                return await act(client, world)

    return asyncio.run(run())


def ask(client, *messages, **kwargs):
    content = [{"role": "user", "content": "hello"}] if not messages else list(messages)
    return client.messages.create(**{"model": "any", "max_tokens": 200, "messages": content, **kwargs})


def test_a_message_has_anthropics_shape_and_the_same_row_as_through_openai(folder, texts):
    async def act(client, world):
        message = await ask(client, system=[{"type": "text", "text": "Be brief."}])
        openai = world.client((await world.open(W))["planner"])
        history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        await openai.chat.completions.create(model="any", messages=history)
        await world.control.finalize(W, rewards=1.0)
        return message, world.sink.rows

    message, (ours, other) = run_with(folder, FakeEngine(texts.says("größer 😀")), act)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.text for block in message.content] == ["größer 😀"]
    assert message.usage.input_tokens == len(ours.prompt_ids)
    assert message.usage.output_tokens == len(ours.response_ids)
    assert message.metadata["model_id"] == "planner_model" and message.metadata["policy_version"] == ["0.1", "0.1"]
    assert ours.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert ours.response_ids.tolist() == other.response_ids.tolist() == texts.ids("größer 😀")


@pytest.mark.parametrize(
    ("said", "kwargs", "reason"),
    [
        ("yes END no", {"stop_sequences": ["END"]}, "stop_sequence"),
        ("yes", {"stop_sequences": ["END", "<|im_end|>"]}, "stop_sequence"),  # a control token, which has no text
        ("x" * 50, {"max_tokens": 5}, "max_tokens"),
    ],
)
def test_stop_reasons_are_told(folder, texts, said, kwargs, reason):
    message = run_with(folder, FakeEngine(texts.says(said)), lambda client, world: ask(client, **kwargs))
    assert message.stop_reason == reason
    assert message.stop_sequence == (kwargs["stop_sequences"][-1] if reason == "stop_sequence" else None)


def test_a_stream_accumulates_to_the_same_message(folder, texts):
    async def act(client, world):
        async with client.messages.stream(
            model="any", max_tokens=200, messages=[{"role": "user", "content": "hello"}], tools=[TOOL]
        ) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            return kinds, await stream.get_final_message()

    kinds, message = run_with(folder, FakeEngine(texts.says("I add. 😀" + CALL)), act)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[0].text == "I add. 😀" and message.content[1].input == {"a": 1}
    assert message.stop_reason == "tool_use" and message.usage.output_tokens > 10
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize(
    "said", ["", "yes", "<think>hm</think>", "<think>\nhm</think>\n\nyes", "<think>hm</think>" + CALL]
)
def test_a_stream_has_the_blocks_of_the_whole_message_also_with_thinking(folder, texts, said):
    async def act(client, world):
        whole = await ask(client, tools=[TOOL])
        hello = [{"role": "user", "content": "hello"}]
        async with client.messages.stream(model="any", max_tokens=200, messages=hello, tools=[TOOL]) as stream:
            return whole, await stream.get_final_message()

    whole, streamed = run_with(folder, FakeEngine(texts.says(said)), act, binding={"split_reasoning": True})
    blocks = [[block.model_dump(exclude={"id"}) for block in message.content] for message in (whole, streamed)]
    assert blocks[0] == blocks[1] and whole.stop_reason == streamed.stop_reason


# A model that says what its calls look like, and does not say that arguments are an object.
ANY_ARGUMENTS = {
    "type": "object",
    "properties": {
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<tool_call>\s*(.*?)\s*</tool_call>",
            "items": {"x-parser": "json", "type": "object", "properties": {"name": {"type": "string"}}},
        }
    },
}


@pytest.mark.parametrize("arguments", ['{"a": 1}', "null", '"one"', "[1, 2]"])
def test_a_tool_using_conversation_is_one_merged_row(tmp_path, arguments):
    folder = make_model_folder(tmp_path / "model", response_schema=ANY_ARGUMENTS)
    texts = Texts(folder)
    call = CALL.replace('{"a": 1}', arguments)
    answers = {1: texts.ids("I add. " + call), 2: texts.ids("3")}
    seen: list[list[int]] = []

    def script(prompt):
        if prompt not in seen:
            seen.append(prompt)
        return answers[seen.index(prompt) + 1]

    async def act(client, world):
        question = {"role": "user", "content": "1+2?"}
        first = await ask(client, question, tools=[TOOL])
        use = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "3"}]}
        history = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await ask(client, *history, tools=[TOOL])
        await world.control.finalize(W, rewards=1.0)
        return world.sink.rows

    [row] = run_with(folder, FakeEngine(script), act, rows="merged", binding={"tool_parser": "model"})
    assert row.response_ids[row.response_mask == 1].tolist() == answers[1] + answers[2]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"max_tokens": 0},
        {"tool_choice": {"type": "any"}, "tools": [TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x" * 2000}]},
    ],
)
def test_client_faults_have_anthropics_error_shape(folder, texts, kwargs):  # invariant 9
    async def act(client, world):
        import anthropic

        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, **kwargs)
        return caught.value, await ask(client)

    caught, good = run_with(folder, FakeEngine(texts.says("fine")), act)
    assert caught.body["type"] == "error" and caught.body["error"]["type"] == "invalid_request_error"
    assert good.content[0].text == "fine"


def test_a_paused_model_and_a_closed_workflow_have_the_statuses_an_sdk_acts_on(folder, texts):
    async def act(client, world):
        import anthropic

        await world.set_state("planner_model", ModelState.SYNCING)
        with pytest.raises(anthropic.RateLimitError) as paused:
            await ask(client)
        await world.control.finalize(W)
        with pytest.raises(anthropic.ConflictError):
            await ask(client)
        return paused.value

    paused = run_with(folder, FakeEngine(texts.says("x")), act, hold_timeout_s=0.05)
    assert paused.response.headers["retry-after"] == "2" and paused.body["error"]["type"] == "rate_limit_error"


def test_tokens_are_counted_as_they_would_be_sent(folder, texts):
    async def act(client, world):
        count = await client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "hello"}])
        return count.input_tokens

    assert run_with(folder, FakeEngine(texts.says("x")), act) == len(texts.prompt("hello"))


def test_the_agents_model_is_listed_and_retrieved_as_anthropic_describes_models(folder, texts):
    import anthropic
    from anthropic.types import ModelInfo

    async def act(client, world):
        listed = [model async for model in client.models.list()]
        raw = await (await client.models.with_raw_response.retrieve("planner_model")).text()
        with pytest.raises(anthropic.NotFoundError, match="planner_model") as caught:
            await client.models.retrieve("claude")
        return listed, raw, caught.value.body

    listed, raw, body = run_with(folder, FakeEngine(texts.says("x")), act)
    assert [ModelInfo.model_validate_json(raw)] == listed and listed[0].id == "planner_model"
    assert set(body) == {"type", "error"}
