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
"""The process behind one ``hf`` replica: verl's checkpoint-engine worker and the rollout server in one."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
import torch
import uvicorn
from omegaconf import DictConfig, OmegaConf
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.model import update_model_config
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import TokenOutput

from ...vision import ImageProcessor
from . import gloo_checkpoint_engine  # noqa: F401  (registers itself)
from .hf_engine import HFEngine
from .http_surface import build_app
from .image_prompts import ImagePrompts, image_bytes
from .process_group import init_process_group
from .rollout_service import GenerationRejected, RolloutService
from .sampling import InvalidRequest, SamplingParams

logger = logging.getLogger(__name__)

# Longer than a router keeps an idle connection (90 s), else it sends a request into one that is just being closed.
KEEP_ALIVE_S = 120

_STOP_REASONS = {"stop": "completed", "length": "length", "abort": "aborted"}


class _InProcessAdapter(BaseRollout):
    """Where ``CheckpointEngineWorker`` delivers weights: the server in the same process."""

    is_leader_rank = True

    def __init__(self, service: RolloutService, replica_rank: int):
        self.replica_rank = replica_rank
        self._service = service

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        """Load, then stamp: the manager resumes generation only after this returns."""
        assert wire_format == "named_tensors", f"wire format {wire_format!r} is not supported"
        await self._service.load(weights)
        if global_steps is not None:
            self._service.set_version(global_steps)

    async def resume(self, tags: list[str]) -> None:
        return None

    async def release(self) -> None:
        return None


class HFRolloutWorker(CheckpointEngineWorker):
    """Serves one model over Ray, as verl calls it, and over SGLang's HTTP surface.

    Args:
        rollout_config: verl's; ``custom`` may hold ``incarnation`` and ``torch_threads``.
        model_config: verl's; only ``path``, ``override_config`` and ``trust_remote_code`` are read.
        replica_rank: of the replica that this is.
    """

    def __init__(self, rollout_config: RolloutConfig, model_config: DictConfig, replica_rank: int):
        custom = dict(rollout_config.custom or {})
        torch.set_num_threads(int(custom.get("torch_threads", 1)))
        init_process_group()
        model = _load_model(rollout_config, model_config)
        processor = ImageProcessor.load(os.path.expanduser(str(model_config.path)))
        self._service = RolloutService(
            _make_engine(model, rollout_config, model_config, seed=rollout_config.seed + replica_rank),
            model_path=str(model_config.path),
            incarnation=int(custom.get("incarnation", 0)),
            images=None if processor is None else ImagePrompts(processor, model),
        )
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task | None = None
        self._address: tuple[str, int] | None = None
        super().__init__(
            rollout_config=rollout_config,
            model_config=model_config,
            server_adapter=_InProcessAdapter(self._service, replica_rank),
        )
        self._service.engine.start(int(custom.get("torch_threads", 1)))

    # -- serving ---------------------------------------------------------------------------------------------------

    async def launch_server(self) -> tuple[str, int]:
        """Open the HTTP surface on this node's address, on a free port; returns both."""
        host = ray.util.get_node_ip_address().strip("[]")
        config = uvicorn.Config(
            build_app(self._service),
            host=host,
            port=0,
            log_level="error",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError(f"the rollout server could not listen on {host}")
            await asyncio.sleep(0.01)
        self._address = (host, self._server.servers[0].sockets[0].getsockname()[1])
        return self._address

    def get_server_address(self) -> tuple[str, int]:
        assert self._address is not None, "the server is launched"
        return self._address

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate as verl's ``LLMServerClient`` asks (``verl/workers/rollout/llm_server.py``).

        Raises:
            InvalidRequest: the prompt leaves no room, or a parameter is not supported.
        """
        if video_data or any(kwargs.values()):
            raise InvalidRequest("the CPU rollout server takes token ids and images only")
        config, engine = self.rollout_config, self._service.engine
        room = engine.max_model_len - len(prompt_ids)
        given = dict(sampling_params)
        default = min(config.response_length, config.prompt_length + config.response_length - len(prompt_ids))
        wanted = given.pop("max_tokens", given.pop("max_new_tokens", default))
        given["max_new_tokens"] = max(0, min(wanted, room))
        given.setdefault("ignore_eos", config.ignore_eos)
        try:
            images = [image_bytes(image) for image in image_data or ()]
            request = await self._service.generate(request_id, list(prompt_ids), SamplingParams.parse(given), images)
        except GenerationRejected:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._steps(None))
        return TokenOutput(
            token_ids=request.output_ids,
            log_probs=request.log_probs,
            stop_reason=_STOP_REASONS[request.finish_reason["type"]],
            extra_fields=self._steps(request.version),
        )

    def _steps(self, version: Any) -> dict[str, Any]:
        version = version or self._service.engine.version
        return {"global_steps": None if version is None else version.number}

    # -- weights ---------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Upstream's method off the loop: joining a group blocks, and health checks must not wait for it."""
        return await asyncio.to_thread(getattr(self.checkpoint_engine, method), *args, **kwargs)

    async def set_global_steps(self, global_steps: int) -> None:
        """Stamp the weights in force, such as those a frozen model loaded at its start."""
        self._service.set_version(global_steps)

    async def checksum(self) -> str:
        """SHA-256 of the served weights (``weights.checksum_of``), equal to the sender's ``sync/checksum``."""
        return await asyncio.to_thread(self._service.engine.weights.checksum)

    # -- control ---------------------------------------------------------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort everything with partial output and hold later requests, or reject them, until resumed."""
        await self._service.pause(reject=reject_request)

    async def resume_generation(self) -> None:
        if not await self._service.resume():
            logger.warning("rollout server %s stays paused: its weights have no version", self._address)

    async def wake_up(self) -> None:
        return None

    async def sleep(self) -> None:
        return None

    async def release_kv_cache(self) -> None:
        return None  # loading weights releases it

    async def resume_kv_cache(self) -> None:
        return None

    async def clear_kv_cache(self) -> None:
        return None  # nothing outlives a request

    async def start_profile(self, **kwargs: Any) -> None:
        return None

    async def stop_profile(self) -> None:
        return None


def _load_model(config: RolloutConfig, model_config: DictConfig) -> PreTrainedModel:
    """A model folder's weights; verl's ``load_format`` makes no difference at these sizes."""
    path = os.path.expanduser(str(model_config.path))
    disable_progress_bar()
    hf_config = _hf_config(path, model_config)
    takes_images = type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    return model_class.from_pretrained(
        path,
        config=hf_config,
        dtype=getattr(torch, config.dtype),
        trust_remote_code=bool(model_config.get("trust_remote_code", False)),
    )


def _make_engine(model: PreTrainedModel, config: RolloutConfig, model_config: DictConfig, seed: int) -> HFEngine:
    path = os.path.expanduser(str(model_config.path))
    limit = model.config.get_text_config().max_position_embeddings
    length = config.max_model_len or min(limit, config.prompt_length + config.response_length)
    if length > limit:
        raise ValueError(f"max_model_len {length} exceeds the model's max_position_embeddings {limit}")
    return HFEngine(
        model,
        max_model_len=length,
        max_batch_size=config.max_num_seqs,
        eos_token_ids=_eos_token_ids(path, model.config),
        seed=seed,
        model_path=path,
    )


def _hf_config(path: str, model_config: DictConfig) -> Any:
    """The folder's config with ``override_config``, which the trainer applies too (verl/workers/config/model.py)."""
    overrides = OmegaConf.to_container(OmegaConf.create(model_config.get("override_config") or {}), resolve=True)
    overrides = overrides.get("model_config", overrides)
    overrides.pop("attn_implementation", None)  # the engine brings its own
    trusted = bool(model_config.get("trust_remote_code", False))
    hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    update_model_config(hf_config, override_config_kwargs=overrides)
    return hf_config


def _eos_token_ids(path: str, model_config: Any) -> set[int]:
    """Of the model's config and its generation config together, as SGLang takes them."""
    found = [getattr(model_config.get_text_config(), "eos_token_id", None)]
    if Path(path, "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids
