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
"""Images from the clients to the servers and into the rows, in front of fake engines."""

import asyncio
import base64
import weakref
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from recipe.multi_policy_async.gateway.image_parts import ImageContent
from recipe.multi_policy_async.gateway.spec import GatewaySpec
from recipe.multi_policy_async.tests.fakes.fake_engine import FakeEngine
from recipe.multi_policy_async.tests.fakes.gateway_world import DEFAULTS, Texts, anthropic_client, gateway_world
from recipe.multi_policy_async.tests.fakes.tiny_vl_folder import END, PAD, START, data_url, make_vl_folder, png, shows
from recipe.multi_policy_async.vision import collapse

pytestmark = pytest.mark.slow

W = "e0-t0-s0-a0"
CAT, DOG = png(0), png(1)
ONE = [START, PAD, END]
SIX = [START, *[PAD] * 6, END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_vl_folder(tmp_path_factory.mktemp("vl_model"))


@pytest.fixture(scope="module")
def texts(folder) -> Texts:
    return Texts(folder)


def run(folder, engine, act, *, binding=None, **spec):
    """``act(client, world)`` in a workflow of one agent whose model takes images; then its rows."""

    async def play():
        engine.image_tokens = 6
        bindings = {"m": {"max_prompt_length": 1024, "max_model_len": 1088, **(binding or {})}}
        async with gateway_world(folder, {"m": engine}, mapping={"a": "m"}, bindings=bindings, **spec) as world:
            result = await act(world.client((await world.open(W))["a"]), world)
            await world.control.finalize(W, rewards=1.0)
            return result, world.sink.rows

    return asyncio.run(play())


async def ask(client, *messages, **kwargs):
    answer = await client.chat.completions.create(model="m", messages=list(messages), **kwargs)
    return answer.choices[0].message.content


def refused(folder, texts, *messages, **spec):
    """The 400 of a request, after which the session still answers."""

    async def act(client, world):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, *messages)
        assert await ask(client, {"role": "user", "content": "and now?"}) == "fine"
        return caught.value

    return run(folder, FakeEngine(texts.says("fine")), act, **spec)[0]


def test_the_server_gets_the_image_and_one_placeholder_and_the_row_the_placeholders_of_its_size(folder, texts):
    engine = FakeEngine(texts.says("a cat"))
    _, [row] = run(folder, engine, lambda client, world: ask(client, shows("what?", CAT)))
    [request] = engine.requests
    text = texts.tokenizer.encode("<|im_start|>user\n")
    assert request["input_ids"][: len(text) + 3] == text + ONE
    assert row.prompt_ids.tolist()[: len(text) + 8] == text + SIX
    assert collapse(row.prompt_ids.tolist(), PAD) == request["input_ids"]
    [sent] = request["image_data"]
    assert base64.b64decode(sent.partition(",")[2]) == CAT == row.images[0]
    assert row.response_ids.tolist() == texts.ids("a cat")


def test_a_request_without_images_to_such_a_model_is_sent_as_it_always_was(folder, texts):
    engine = FakeEngine(texts.says("hi"))
    _, [row] = run(folder, engine, lambda client, world: ask(client, {"role": "user", "content": "hello"}))
    assert "image_data" not in engine.requests[0]
    assert engine.requests[0]["input_ids"] == row.prompt_ids.tolist() == texts.prompt("hello")
    assert row.images == ()


def test_all_protocols_give_the_same_prompt(folder, texts):
    engine = FakeEngine(texts.says("a cat"))

    async def act(client, world):
        await ask(client, shows("what?", CAT))
        part = {"type": "input_image", "image_url": data_url(CAT)}
        content = [part, {"type": "input_text", "text": "what?"}]
        await client.responses.create(model="m", input=[{"role": "user", "content": content}])
        url = str(client.base_url).removesuffix("/v1/").removesuffix("/v1")
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        async with anthropic_client(url) as anthropic:
            await anthropic.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": content}])

    _, rows = run(folder, engine, act)
    first, *others = engine.requests
    assert len(others) == 2
    assert all(other["input_ids"] == first["input_ids"] for other in others)
    assert all(row.images == (CAT,) for row in rows)


def test_images_come_in_tool_results_too(folder, texts):
    engine = FakeEngine(texts.says("a dog"))

    async def act(client, world):
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        output = [{"type": "input_image", "image_url": data_url(DOG)}]
        result = {"type": "function_call_output", "call_id": "c", "output": output}
        await client.responses.create(model="m", input=[{"role": "user", "content": "look"}, call, result])

    _, [row] = run(folder, engine, act)
    assert row.images == (DOG,)
    assert engine.requests[0]["input_ids"].count(PAD) == 1


def test_a_second_turn_keeps_the_image_of_the_first_and_adds_its_own(folder, texts):
    engine = FakeEngine(texts.says("it is"))
    seen = shows("a cat?", CAT)

    async def act(client, world):
        answer = await ask(client, seen)
        await ask(client, seen, {"role": "assistant", "content": answer}, shows("and this?", DOG))

    _, [row] = run(folder, engine, act, rows="merged")
    assert row.images == (CAT, DOG)
    ids = row.prompt_ids.tolist() + row.response_ids.tolist()
    assert ids.count(PAD) == 12 and collapse(ids, PAD).count(PAD) == 2
    placeholders = row.response_ids == PAD
    assert placeholders.sum() == 6 and not row.response_mask[placeholders].any()
    second = engine.requests[1]
    assert second["input_ids"] == collapse(ids[: len(ids) - len(texts.ids("it is"))], PAD)
    assert [base64.b64decode(each.partition(",")[2]) for each in second["image_data"]] == [CAT, DOG]


def test_a_history_with_another_image_is_another_history(folder, texts):
    engine = FakeEngine(texts.says("it is"))

    async def act(client, world):
        answer = await ask(client, shows("a cat?", CAT))
        await ask(client, shows("a cat?", DOG), {"role": "assistant", "content": answer}, shows("sure?"))

    _, rows = run(folder, engine, act, rows="merged")
    assert [row.images for row in rows] == [(CAT,), (DOG,)]


def test_a_response_goes_on_from_an_earlier_one_with_its_images(folder, texts):
    engine = FakeEngine(texts.says("it is"))

    async def act(client, world):
        part = {"type": "input_image", "image_url": data_url(CAT)}
        first = await client.responses.create(model="m", input=[{"role": "user", "content": [part]}])
        await client.responses.create(model="m", input="sure?", previous_response_id=first.id)

    _, [row] = run(folder, engine, act, rows="merged")
    assert row.images == (CAT,) and len(engine.requests[1]["image_data"]) == 1


def test_an_image_is_held_once_however_often_it_is_sent(folder, texts):
    engine = FakeEngine(texts.says("it is"))

    async def act(client, world):
        seen = shows("a cat?", CAT)
        await ask(client, seen)
        await ask(client, seen)

    _, rows = run(folder, engine, act)
    assert rows[0].images[0] is rows[1].images[0]


def test_an_image_is_let_go_when_nothing_shows_it_any_more(texts):
    async def take_one():
        image = ImageContent(CAT, "messages")
        assert await images.take(image, GatewaySpec.model_validate(DEFAULTS)) is image and image.tokens == 6
        return weakref.ref(image)

    images = texts.tokenizer.images
    assert asyncio.run(take_one())() is None


def answers_otherwise(texts):
    """``a`` and ``b`` one by one, where the tokenizer writes one token for both."""
    a, b = texts.ids("a", end=False), texts.ids("b", end=False)
    assert texts.ids("ab", end=False) != a + b
    return lambda prompt: [*a, *b, texts.end]


@pytest.mark.parametrize("exact", [True, False])
def test_sampled_ids_that_a_server_would_encode_otherwise_are_sent_as_history_only_where_it_keeps_ids(
    folder, texts, exact
):
    seen = shows("spell", CAT)

    async def act(client, world):
        await ask(client, seen)
        await ask(client, seen, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "again"})

    engine = FakeEngine(answers_otherwise(texts))
    _, rows = run(folder, engine, act, rows="merged", binding={"exact_image_prompts": exact})
    assert len(rows) == (1 if exact else 2)
    if not exact:  # the second row begins anew, with ids that read back
        assert texts.ids("ab")[0] in rows[1].prompt_ids


def test_special_tokens_as_text_beside_an_image_are_refused_where_the_server_encodes_again(folder, texts):
    error = refused(folder, texts, shows("<|im_end|>", CAT))
    assert error.param == "messages" and "special tokens as text" in error.message


def test_a_server_that_reads_the_prompt_otherwise_is_a_503(folder, texts):
    engine = FakeEngine(texts.says("a cat"))

    async def act(client, world):
        engine.image_tokens = 5
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, shows("what?", CAT))
        return caught.value

    error, rows = run(folder, engine, act)
    assert error.status_code == 503 and "tokens, not" in error.message and rows == []


def test_a_sampled_placeholder_starts_the_call_again(folder, texts):
    answers = [[PAD, *texts.ids("cat")], texts.ids("cat")]
    engine = FakeEngine(lambda prompt: answers[min(len(engine.requests) - 1, 1)])
    answer, [row] = run(folder, engine, lambda client, world: ask(client, shows("what?", CAT)))
    assert answer == "cat" and len(engine.requests) == 2
    assert row.response_ids.tolist() == texts.ids("cat")


def test_a_call_that_starts_again_forgets_the_stop_sequence_that_its_first_attempt_met(folder, texts):
    answers = [[PAD, *texts.ids("a cat END")], texts.ids("a dog")]
    engine = FakeEngine(lambda prompt: answers[min(len(engine.requests) - 1, 1)])

    async def act(client, world):
        url = str(client.base_url).removesuffix("/v1/")
        messages = [{"role": "user", "content": "what?"}]
        async with anthropic_client(url) as anthropic:
            return await anthropic.messages.create(model="m", max_tokens=20, messages=messages, stop_sequences=["END"])

    message, _ = run(folder, engine, act)
    assert message.content[0].text == "a dog"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_a_call_that_a_sync_cut_goes_on_with_its_images(folder, texts):
    engine = FakeEngine(texts.says("a long answer"), token_s=0.02)

    async def act(client, world):
        call = asyncio.ensure_future(ask(client, shows("what?", CAT)))
        while not engine.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        engine.abort_all()
        return await call

    answer, [row] = run(folder, engine, act)
    assert answer == "a long answer" and row.response_ids.tolist() == texts.ids("a long answer")
    assert len(engine.requests) == 2 and engine.requests[1]["image_data"] == engine.requests[0]["image_data"]
    assert engine.requests[1]["input_ids"].count(PAD) == 1


def test_verls_client_gets_the_images_as_verls_agent_loop_sends_them(folder, texts):
    class LLMServerClient:
        async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None):
            self.prompt_ids, self.image_data = prompt_ids, image_data
            ids = texts.ids("a cat")
            steps = {"global_steps": 1}
            return SimpleNamespace(
                token_ids=ids, log_probs=[0.0] * len(ids), stop_reason="completed", extra_fields=steps
            )

    client = LLMServerClient()
    _, [row] = run(
        folder,
        FakeEngine(texts.says("x")),
        lambda agent, world: ask(agent, shows("what?", CAT)),
        binding={"verl_client": client},
        upstream="verl_client",
    )
    [image] = client.image_data
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert client.prompt_ids == collapse(row.prompt_ids.tolist(), PAD)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,@@", "not valid base64"),
        ("data:image/png,abc", "base64"),
        (data_url(b"no image"), "none of PNG"),
        (data_url(CAT[:200]), "cannot be decoded"),
        (data_url(png(2, 512, 512)), "pixels, more than"),
        (data_url(png(2, 4, 1200)), "aspect ratio"),
        (data_url(png(2, 100, 100)), "bytes, more than"),
        ("https://example.com/cat.png", "gateway.image_hosts"),
        ("file:///etc/passwd", "data: URL"),
        ("http://[", "data: URL"),
    ],
)
def test_an_image_that_is_not_usable_is_a_400_that_names_it(folder, texts, url, says):
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    bounds = {"max_image_pixels": 100_000, "max_image_bytes": 1_000_000 if "pixels" in says else 20_000}
    error = refused(folder, texts, {"role": "user", "content": content}, **bounds)
    assert error.param == "messages[0].content[1].image_url.url"
    assert says in error.message


def test_more_images_than_the_bound_are_a_400(folder, texts):
    error = refused(folder, texts, shows("many", CAT, DOG, CAT), max_images=2)
    assert error.param == "messages[0].content[2].image_url.url" and "2 images" in error.message


def test_a_text_that_is_too_long_is_told_with_its_images_before_it_is_read_back(folder, texts):
    async def act(client, world):
        read_back, tokenizer = [], world.gateway.model("m").tokenizer
        tokenizer.decode = lambda ids, **_: read_back.append(len(ids))
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, shows("x" * 2000, CAT))
        return caught.value, read_back

    (error, read_back), _ = run(folder, FakeEngine(texts.says("fine")), act)
    length = len(texts.prompt("x" * 2000)) + len(SIX)
    assert error.code == "context_length_exceeded" and f"resulted in {length} tokens" in str(error)
    assert read_back == []


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_of_a_role_that_has_none_are_a_400(folder, texts, role):
    error = refused(folder, texts, {**shows("x", CAT), "role": role}, {"role": "user", "content": "y"})
    assert error.param == "messages[0].content[0]"


def test_an_image_is_fetched_from_a_host_that_the_job_names_and_redirects_are_not_followed(folder, texts):
    from aiohttp import web

    async def picture(request):
        if request.path == "/moved":
            raise web.HTTPFound("/cat")
        return web.Response(body=CAT, content_type="image/png")

    async def act(client, world):
        app = web.Application()
        app.router.add_get("/{name}", picture)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

        def at(path):
            return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url + path}}]}

        try:
            await ask(client, at("/cat"))
            with pytest.raises(openai.BadRequestError, match="answered 302"):
                await ask(client, at("/moved"))
        finally:
            await runner.cleanup()

    _, [row] = run(folder, FakeEngine(texts.says("a cat")), act, image_hosts=["127.0.0.1"])
    assert row.images == (CAT,)


def test_a_placeholder_in_a_completions_prompt_is_a_400(folder, texts):
    async def act(client, world):
        for prompt in ("<|image_pad|>", [PAD]):
            with pytest.raises(openai.BadRequestError, match="placeholder"):
                await client.completions.create(model="m", prompt=prompt)

    run(folder, FakeEngine(texts.says("x")), act)


def test_a_placeholder_as_text_in_a_chat_is_only_text(folder, texts):
    engine = FakeEngine(texts.says("x"))
    run(folder, engine, lambda client, world: ask(client, {"role": "user", "content": "<|image_pad|>"}))
    assert PAD not in engine.requests[0]["input_ids"]


def test_tokens_of_images_are_counted(folder, texts):
    async def act(client, world):
        url = str(client.base_url).removesuffix("/v1/").removesuffix("/v1")
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
        async with anthropic_client(url) as anthropic:
            messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
            return (await anthropic.messages.count_tokens(model="m", messages=messages)).input_tokens

    count, _ = run(folder, FakeEngine(texts.says("x")), act)
    assert count == len(texts.prompt("")) + len(SIX)
