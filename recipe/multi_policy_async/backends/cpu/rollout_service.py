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
"""The rollout server behind both of its surfaces (Ray and HTTP): asyncio in front of the engine's thread."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ...trajectory import Version
from .generation_request import GenerationRequest
from .hf_engine import HFEngine
from .image_prompts import ImagePrompts
from .sampling import InvalidRequest, SamplingParams


class GenerationFailed(RuntimeError):
    """The engine could not generate, through no fault of the request."""


class GenerationRejected(RuntimeError):
    """The server is paused and was told to reject instead of hold."""


class RolloutService:
    """One model's generation on one server.

    Args:
        engine: started by the caller.
        model_path: reported to clients.
        incarnation: of every version this server stamps; it grows when its model is restored.
        images: of a model that takes images.
    """

    def __init__(self, engine: HFEngine, *, model_path: str, incarnation: int, images: ImagePrompts | None = None):
        self.engine = engine
        self._images = images
        self.model_path = model_path
        self.incarnation = incarnation
        self._rejecting = False

    @property
    def weight_version(self) -> str:
        """``<incarnation>.<number>``, or SGLang's word for a version never set."""
        return str(self.engine.version or "default")

    async def generate(
        self, rid: str, input_ids: list[int], params: SamplingParams, images: Sequence[bytes] = ()
    ) -> GenerationRequest:
        """Generate to the end, or to an abort; a cancelled caller aborts its request.

        Args:
            images: one for every placeholder in ``input_ids``.

        Raises:
            InvalidRequest, QueueFull: see ``HFEngine.submit``.
            GenerationFailed: the engine failed.
            GenerationRejected: paused with ``reject``.
        """
        return [request async for request in self._run(rid, input_ids, params, images, every_token=False)][-1]

    def stream(
        self, rid: str, input_ids: list[int], params: SamplingParams, images: Sequence[bytes] = ()
    ) -> AsyncIterator[GenerationRequest]:
        """Like ``generate``, and yields the growing request after each token or several, the finished one last.

        Close the iterator to abort the request.
        """
        return self._run(rid, input_ids, params, images, every_token=True)

    async def _run(
        self, rid: str, input_ids: list[int], params: SamplingParams, images: Sequence[bytes], *, every_token: bool
    ) -> AsyncIterator[GenerationRequest]:
        if self._rejecting:
            raise GenerationRejected("the server takes no requests until it resumes")
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake(_: GenerationRequest) -> None:
            loop.call_soon_threadsafe(changed.set)

        image_prompt = None
        if images:
            if self._images is None:
                raise InvalidRequest("image_data is not supported: this server's model takes no images")
            input_ids, image_prompt = await asyncio.to_thread(self._images.prepare, input_ids, images)
        request = GenerationRequest(rid, input_ids, params, on_finish=wake, on_token=wake if every_token else None)
        request.image_prompt = image_prompt
        self.engine.submit(request)
        try:
            while request.finish_reason is None:
                await changed.wait()
                changed.clear()
                if request.finish_reason is None:
                    yield request
        finally:
            if request.finish_reason is None:
                self.engine.abort(rid)
        if request.error is not None:
            raise GenerationFailed(request.error)
        yield request

    async def pause(self, *, reject: bool = False) -> None:
        """Abort all requests with what they have and hold later ones, or reject them. Returns when no row runs."""
        self._rejecting = reject
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> bool:
        """Generate again; false, and still paused, while the weights have no version."""
        resumed = self.engine.resume()
        if resumed:
            self._rejecting = False
        return resumed

    async def load(self, weights: AsyncIterator[tuple[str, Any]]) -> None:
        """Replace all weights. The server stays paused until the new ones have a version.

        Raises:
            ValueError: an unknown, misshapen or missing weight; the server then stays paused.
        """
        self.engine.begin_load()
        async for name, tensor in weights:
            self.engine.weights.load(name, tensor)
        self.engine.weights.finish_load()

    def set_version(self, number: int) -> None:
        """Stamp the loaded weights, before generation resumes (invariant 5)."""
        self.engine.set_version(Version(self.incarnation, number))


def meta_info(request: GenerationRequest, weight_version: str, *, with_log_probs: bool) -> dict[str, Any]:
    """SGLang's ``meta_info``; log-probs as ``[log-prob, token id, null]`` per output token.

    The engine may be appending to the request: the reason is read first and the tokens are counted by the list that
    grows last, so an answer with a reason is complete and ids and log-probs always have one length.
    """
    reason = request.finish_reason
    tokens = len(request.log_probs)
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_version": str(request.version or weight_version),
    }
    if with_log_probs:
        pairs = zip(request.log_probs[:tokens], request.output_ids[:tokens], strict=True)
        info["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    return info
