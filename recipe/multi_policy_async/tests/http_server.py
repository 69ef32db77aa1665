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
"""The CPU rollout server without Ray: engine, service and HTTP surface in this process."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn
from transformers import Qwen3ForCausalLM

from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.backends.cpu.http_surface import build_app
from recipe.multi_policy_async.backends.cpu.image_prompts import ImagePrompts
from recipe.multi_policy_async.backends.cpu.rollout_service import RolloutService
from recipe.multi_policy_async.tests.tiny_qwen3 import EOS

MAX_LEN = 256


class HttpServer:
    """The service and its HTTP surface in one thread's event loop, as in the rollout worker."""

    def __init__(
        self,
        model: Qwen3ForCausalLM | None = None,
        *,
        engine: HFEngine | None = None,
        incarnation: int = 2,
        images: ImagePrompts | None = None,
    ):
        self.engine = engine or HFEngine(model, max_model_len=MAX_LEN, max_batch_size=8, eos_token_ids=[EOS])
        self.service = RolloutService(self.engine, model_path="some/model", incarnation=incarnation, images=images)
        self._server = uvicorn.Server(
            uvicorn.Config(build_app(self.service), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._server.serve()

    def start(self) -> None:
        self.engine.start(torch_threads=1)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self.engine.stop()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def wait(self, condition, timeout_s: float = 10) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.005)


@contextmanager
def slow_model(model: torch.nn.Module, seconds: float) -> Iterator[None]:
    """Each step of the model takes at least this long."""
    hook = model.lm_head.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()
