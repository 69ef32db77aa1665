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
"""Prompts with images on the CPU rollout server."""

import base64

import httpx
import pytest
import torch

from recipe.multi_policy_async.backends.cpu.generation_request import GenerationRequest
from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.backends.cpu.image_prompts import ImagePrompts
from recipe.multi_policy_async.backends.cpu.sampling import InvalidRequest, SamplingParams
from recipe.multi_policy_async.tests.fakes.tiny_vl_folder import END, PAD, START, data_url, make_vl_folder, png
from recipe.multi_policy_async.tests.hf_engine_driver import run
from recipe.multi_policy_async.tests.http_server import HttpServer
from recipe.multi_policy_async.tests.tiny_qwen_vl import KINDS, full_vl_log_probs, tiny_vl_model
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.vision import ImageProcessor

pytestmark = pytest.mark.slow

CAT, DOG = png(0), png(1, 24, 40)  # 6 and 15 tokens
ONE = [START, PAD, END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_vl_folder(tmp_path_factory.mktemp("vl_model"))


@pytest.fixture(scope="module", params=KINDS)
def served(request, folder):
    model = tiny_vl_model(request.param)
    engine = HFEngine(model, max_model_len=128, max_batch_size=8)
    engine.set_version(Version(0, 1))
    assert engine.resume()
    return engine, ImagePrompts(ImageProcessor.load(folder), model), tiny_vl_model(request.param)


def submit(served, rid, ids, images=(), **params) -> GenerationRequest:
    engine, prompts, _ = served
    params = SamplingParams.parse({"max_new_tokens": 12, "ignore_eos": True, **params})
    image_prompt = None
    if images:
        ids, image_prompt = prompts.prepare(ids, images)
    request = GenerationRequest(rid, ids, params, on_finish=lambda _: None, image_prompt=image_prompt)
    engine.submit(request)
    return request


def assert_agrees(served, folder, request: GenerationRequest, images=()) -> None:
    assert request.error is None
    if PAD in request.output_ids:  # nothing can be computed behind it; the gateway samples such a call again
        return
    log_probs = full_vl_log_probs(served[2], folder, request.prompt_ids + request.output_ids, images)
    expected = log_probs[len(request.prompt_ids) - 1 :].tolist()
    assert request.log_probs == pytest.approx(expected, abs=1e-4)


def test_sampled_log_probs_equal_a_full_forward_with_the_images(served, folder):
    request = submit(served, "a", [10, 11, *ONE, 12, *ONE, 13, 14], (CAT, DOG))
    run(served[0], request)
    assert request.prompt_ids.count(PAD) == 6 + 15
    assert_agrees(served, folder, request, (CAT, DOG))


def test_rows_with_and_without_images_run_together_and_join_late(served, folder):
    requests = [
        (submit(served, "a", [10, *ONE, 13], (CAT,), max_new_tokens=20), (CAT,)),
        (submit(served, "b", [20, 21, 22]), ()),
        (submit(served, "c", [10, *ONE, 13], (DOG,), max_new_tokens=4), (DOG,)),
    ]
    for _ in range(3):
        served[0].step()
    requests += [
        (submit(served, "d", [10, *ONE, 13], (CAT,)), (CAT,)),
        (submit(served, "e", [10, *ONE, 13], (CAT,)), (CAT,)),
    ]
    run(served[0], *(request for request, _ in requests))
    for request, images in requests:
        assert_agrees(served, folder, request, images)


def test_equal_ids_with_other_images_do_not_share_a_cache(served, folder):
    other = png(5)
    first = submit(served, "a", [10, *ONE, 13], (CAT,), temperature=0)
    second = submit(served, "b", [10, *ONE, 13], (other,), temperature=0)
    run(served[0], first, second)
    assert first.prompt_ids == second.prompt_ids
    assert_agrees(served, folder, first, (CAT,))
    assert_agrees(served, folder, second, (other,))
    assert first.log_probs != second.log_probs


@pytest.mark.parametrize(
    ("ids", "images", "says"),
    [
        ([10, 11], (CAT,), "0 image placeholders for 1 images"),
        ([10, *ONE, *ONE, 11], (CAT,), "2 image placeholders for 1 images"),
        ([10, *ONE, 11], (b"no image",), "cannot identify"),
        ([10, START, PAD], (CAT,), "end in an image"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused(served, ids, images, says):
    with pytest.raises(InvalidRequest, match=says):
        served[1].prepare(ids, images)


def test_the_http_surface_takes_images_as_sglang_does(served, folder):
    model = served[2]
    engine = HFEngine(model, max_model_len=128, max_batch_size=8)
    server = HttpServer(engine=engine, images=ImagePrompts(ImageProcessor.load(folder), model))
    server.start()
    try:
        server.service.set_version(1)
        assert server.call(server.service.resume())
        body = {
            "input_ids": [10, *ONE, 13],
            "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0},
            "return_logprob": True,
        }
        forms = [[data_url(CAT)], base64.b64encode(CAT).decode()]
        answers = [httpx.post(f"{server.url}/generate", json={**body, "image_data": form}).json() for form in forms]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
        assert answers[0]["meta_info"]["prompt_tokens"] == 10
        for bad in ["@@", ["http://example.com/a.png"], [3]]:
            assert httpx.post(f"{server.url}/generate", json={**body, "image_data": bad}).status_code == 400
    finally:
        server.stop()


def test_a_text_model_refuses_images():
    from recipe.multi_policy_async.tests.tiny_qwen3 import tiny_qwen3

    server = HttpServer(tiny_qwen3())
    server.start()
    try:
        server.service.set_version(1)
        server.call(server.service.resume())
        body = {"input_ids": [1, 2], "image_data": [data_url(CAT)]}
        answer = httpx.post(f"{server.url}/generate", json=body)
        assert answer.status_code == 400 and "takes no images" in answer.text
    finally:
        server.stop()


def test_a_prepared_prompt_has_the_positions_of_its_whole_length(served):
    ids, prompt = served[1].prepare([10, *ONE, 13, 14], (CAT,))
    assert prompt.positions.shape == (4, len(ids))
    assert torch.equal(prompt.positions[0], torch.arange(len(ids)))
    assert int(prompt.positions[1, -1]) == len(ids) - 1 + prompt.shift
