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
"""Images on the whole path: client, gateway, CPU engine, ledger, batch; then log-probs anew from the batch."""

import asyncio

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.model import extract_multi_modal_inputs

from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.backends.cpu.image_prompts import ImagePrompts
from recipe.multi_policy_async.gateway.router_process import RouterProcess
from recipe.multi_policy_async.runtime.batch_assembly import assemble
from recipe.multi_policy_async.runtime.image_inputs import ImageInputs
from recipe.multi_policy_async.tests.fakes.gateway_world import gateway_world
from recipe.multi_policy_async.tests.fakes.tiny_vl_folder import PAD, png, shows
from recipe.multi_policy_async.tests.fakes.workflow_records import ingest_spec, queue_spec
from recipe.multi_policy_async.tests.http_server import HttpServer
from recipe.multi_policy_async.tests.tiny_qwen_vl import KINDS, full_vl_log_probs, save_tiny_vl, tiny_vl_model
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor
from recipe.multi_policy_async.vision import ImageProcessor

pytestmark = pytest.mark.slow

CAT, DOG = png(0), png(1, 24, 40)
LENGTHS = {"max_prompt_length": 256, "max_response_length": 192, "max_model_len": 448}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_tiny_vl(tmp_path_factory.mktemp("vl_model"), kind)


class Server:
    """A CPU rollout server as ``gateway_world`` starts one, behind a router or not."""

    def __init__(self, kind, folder, log):
        model = tiny_vl_model(kind)
        engine = HFEngine(model, max_model_len=448, max_batch_size=8, eos_token_ids=[])
        self._http = HttpServer(engine=engine, incarnation=0, images=ImagePrompts(ImageProcessor.load(folder), model))
        self._router = None
        self._log = log

    async def start(self):
        self._http.start()
        self._http.service.set_version(1)
        assert self._http.call(self._http.service.resume())
        if self._log is None:
            return self._http.url
        self._router = RouterProcess("m", [self._http.url], "sglang_router", self._log, policy="cache_aware")
        self._router.start()
        await self._router.wait_ready(60)
        return self._router.url

    async def stop(self):
        if self._router is not None:
            self._router.stop()
        self._http.stop()


async def converse(client):
    """Three turns: an image, text, another image."""
    messages = [shows("what is it?", CAT)]
    for more in ({"role": "user", "content": "sure?"}, shows("and this?", DOG), None):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, more]


async def play(server, folder, ledger, rows):
    """Two workflows of a task and one without an image; the batch that a trainer takes of them."""
    async with gateway_world(
        folder,
        {"m": server},
        mapping={"a": "m"},
        bindings={"m": {**LENGTHS, "exact_image_prompts": True}},
        rows=rows,
        upstream_retries=5,
    ) as world:
        ingestor = TrajectoryIngestor(ledger, ingest_spec())
        try:
            await ingestor.register_policy("m", queue_spec(), True)
            for sample in range(2):
                workflow_id = f"e0-t0-s{sample}-a0"
                await ingestor.issue(workflow_id, 2)
                client = world.client((await world.open(workflow_id))["a"])
                await converse(client)
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "no image"}], max_tokens=8
                )
                await world.control.finalize(workflow_id, rewards=float(sample))
            for record in world.sink.records:
                await ingestor.ingest(record)
            return await ingestor.take("m", 1, Version(0, 1), 1)
        finally:
            await ingestor.close()


@pytest.fixture(scope="module", params=["per_call", "merged"])
def taken(request, kind, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    log = path / "router.log" if request.param == "merged" else None
    return asyncio.run(play(Server(kind, folder, log), folder, path / "ledger.sqlite", request.param))


def test_log_probs_computed_again_from_the_batch_are_those_that_the_engine_sampled_with(kind, folder, taken):
    images = ImageInputs.load(str(folder))
    batch = assemble(taken, dp_size=1, wanted_updates=2, pad_token_id=0, version=1, images=images).data
    pixels = extract_multi_modal_inputs(batch.non_tensor_batch["multi_modal_inputs"])  # as verl's engine collects them
    assert sum(pixels.pop("images_seqlens")) == len(pixels["pixel_values"])
    with torch.no_grad():
        logits = tiny_vl_model(kind)(
            input_ids=batch.batch["input_ids"],
            attention_mask=batch.batch["attention_mask"],
            position_ids=batch.batch["position_ids"].transpose(0, 1),
            **pixels,
        ).logits
    responses, mask = batch.batch["responses"], batch.batch["response_mask"].bool()
    logits = logits[:, -responses.shape[1] - 1 : -1].float()
    again = torch.log_softmax(logits, dim=-1).gather(-1, responses[..., None])[..., 0]
    assert mask.sum() > 40
    torch.testing.assert_close(again[mask], batch.batch["rollout_log_probs"][mask], atol=1e-4, rtol=0)


def test_every_row_has_its_images_and_placeholders_are_context(folder, taken):
    rows = [row for group in taken.groups for row in group.trajectories]
    assert {row.images for row in rows} >= {(CAT, DOG), ()}
    assert any(row.response_mask.min() == 0 for row in rows) == any(len(row.metadata["calls"]) > 1 for row in rows)
    for row in rows:
        ids = np.concatenate([row.prompt_ids, row.response_ids])
        assert (ids == PAD).sum() == {(): 0, (CAT,): 6, (CAT, DOG): 21}[row.images]
        assert PAD not in row.response_ids[row.response_mask == 1]
        expected = full_vl_log_probs(tiny_vl_model_of(folder), folder, ids, row.images)[len(row.prompt_ids) - 1 :]
        sampled = row.response_mask == 1
        assert row.log_probs[sampled] == pytest.approx(expected.numpy()[sampled], abs=1e-4)


def tiny_vl_model_of(folder):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


class AgentLoop:
    """verl's agent-loop worker, as far as its functions on images go; its own processor needs torchvision."""

    def __init__(self, folder):
        self.processor = ImageInputs.load(str(folder)).rope_model
        self.processor.image_token_id = PAD


def test_positions_are_those_of_verls_agent_loop(folder, taken):
    images = ImageInputs.load(str(folder))
    batch = assemble(taken, dp_size=1, wanted_updates=1, pad_token_id=0, version=1, images=images).data
    for i, inputs in enumerate(batch.non_tensor_batch["multi_modal_inputs"]):
        ids, attention = batch.batch["input_ids"][i : i + 1], batch.batch["attention_mask"][i : i + 1]
        given = {**inputs, "mm_token_type_ids": True}
        theirs = AgentLoopWorker._compute_position_ids(AgentLoop(folder), ids, attention, given)[0]
        real = attention[0].bool()
        assert torch.equal(batch.batch["position_ids"][i][:, real], theirs[:, real])
