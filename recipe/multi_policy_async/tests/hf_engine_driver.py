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
"""Drives an ``HFEngine`` by hand, step by step, and checks its log-probs."""

import pytest
import torch

from recipe.multi_policy_async.backends.cpu.generation_request import GenerationRequest
from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.backends.cpu.sampling import SamplingParams
from recipe.multi_policy_async.tests.tiny_qwen3 import EOS, full_forward_log_probs, tiny_qwen3
from recipe.multi_policy_async.trajectory import Version

MAX_LEN = 96
MODEL = tiny_qwen3()
FIRST = Version(0, 1)


def make_engine(model=None, *, version: Version | None = FIRST, **kwargs) -> HFEngine:
    arguments = {"max_model_len": MAX_LEN, "max_batch_size": 8, "eos_token_ids": [EOS], **kwargs}
    engine = HFEngine(model or MODEL, **arguments)
    if version is not None:
        engine.set_version(version)
        assert engine.resume()
    return engine


def submit(engine: HFEngine, rid: str, prompt: list[int], **params) -> GenerationRequest:
    params = {"max_new_tokens": 8, "ignore_eos": True, **params}
    request = GenerationRequest(rid, prompt, SamplingParams.parse(params), on_finish=lambda _: None)
    engine.submit(request)
    return request


def load(engine: HFEngine, model: torch.nn.Module, version: Version) -> None:
    engine.begin_load()
    for name, tensor in model.state_dict().items():
        engine.weights.load(name, tensor)
    engine.weights.finish_load()
    engine.set_version(version)


def run(engine: HFEngine, *requests: GenerationRequest) -> None:
    for _ in range(1000):
        if all(request.finish_reason for request in requests):
            return
        engine.step()
    raise AssertionError("the requests did not finish")


def assert_agrees(request: GenerationRequest, model=MODEL, tolerance: float = 5e-5) -> None:
    assert request.error is None
    expected = full_forward_log_probs(model, request.prompt_ids, request.output_ids, request.params.temperature)
    assert request.log_probs == pytest.approx(expected, abs=tolerance)
