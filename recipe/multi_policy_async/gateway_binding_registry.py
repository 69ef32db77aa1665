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
"""The bridge between trainers and gateway: what a model's runtime tells the gateway about itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .gateway.spec import ConcurrencySpec
from .trajectory import Version


class ModelState(str, Enum):
    """What a model's rollout servers can do now; pushed by that model's runtime."""

    STARTING = "starting"  # not served yet, or started again: requests wait
    OPEN = "open"  # requests pass
    DRAINING = "draining"  # new requests wait, running ones go on
    SYNCING = "syncing"  # weights move: new requests wait, running ones were aborted and will be resumed
    DOWN = "down"  # requests fail at once


@dataclass(frozen=True)
class ModelStatus:
    """A status message of a model's runtime; ``version`` is for people and metrics, engines stamp the rows."""

    state: ModelState
    version: Version


@dataclass(frozen=True, kw_only=True)
class ModelBinding:
    """Everything the gateway needs to serve one model. Binding again (a restore) replaces the former one."""

    model_id: str
    model_path: str  # folder with tokenizer.json, chat template, generation_config.json
    trained: bool  # False = frozen: clients decide the sampling, rows are recorded but never trained
    incarnation: int
    sampling: dict[str, Any]  # the rollout config's temperature, top_p, top_k, min_p, penalties
    eval_sampling: dict[str, Any] = field(default_factory=dict)  # its val_kwargs: what differs in evaluation
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens
    max_model_len: int  # tokens, prompt and response together
    router_url: str | None = None  # this model's sglang-router
    replica_urls: list[str] = field(default_factory=list)  # control calls go here, the router answers them with 404
    verl_client: Any | None = None  # verl's LLMServerClient, for upstream=verl_client
    partial_rollout: bool = True  # False: an aborted call starts again from its prompt
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking: false
    tool_parser: str = "hermes"  # see gateway/output_parsing.py
    split_reasoning: bool = False  # <think> blocks go to reasoning_content
    concurrency: ConcurrencySpec | None = None  # None: no limit on the calls at its servers
    exact_image_prompts: bool = False  # its servers keep the ids of a prompt with images (gateway/images.py)

    def __post_init__(self) -> None:
        for name in ("max_prompt_length", "max_response_length", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {self.model_id}: {name} must be at least 1, got {getattr(self, name)}")


class GatewayBindingRegistry:
    """Model id -> binding and latest status. Unknown ids are refused: a runtime cannot touch what is not of its job."""

    def __init__(self, model_ids: Iterable[str]) -> None:
        self._bindings: dict[str, ModelBinding | None] = {model_id: None for model_id in model_ids}
        self._statuses: dict[str, ModelStatus] = {
            model_id: ModelStatus(ModelState.STARTING, Version(0, 0)) for model_id in self._bindings
        }

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(self._bindings)

    def bind(self, binding: ModelBinding) -> None:
        """Store a model's binding.

        Raises:
            ValueError: the model is not of this job, or an older incarnation binds after a newer one.
        """
        self._check(binding.model_id)
        former = self._bindings[binding.model_id]
        if former is not None and former.incarnation > binding.incarnation:
            raise ValueError(
                f"model {binding.model_id}: incarnation {binding.incarnation} binds after {former.incarnation}"
            )
        self._bindings[binding.model_id] = binding

    def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Store a model's status.

        Raises:
            ValueError: the model is not of this job.
        """
        self._check(model_id)
        self._statuses[model_id] = status

    def binding(self, model_id: str) -> ModelBinding | None:
        """The model's binding, None while its runtime is still starting."""
        self._check(model_id)
        return self._bindings[model_id]

    def status(self, model_id: str) -> ModelStatus:
        self._check(model_id)
        return self._statuses[model_id]

    def _check(self, model_id: str) -> None:
        if model_id not in self._bindings:
            raise ValueError(f"unknown model {model_id!r}; this job has {sorted(self._bindings)}")
