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
"""One request at the engine, from its arrival to its answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...trajectory import Version
from .image_prompts import ImagePrompt
from .sampling import SamplingParams


class QueueFull(RuntimeError):
    """More requests wait than the engine holds; nothing is wrong with this one."""


@dataclass(eq=False)
class GenerationRequest:
    """One attempt at a generation, under its own ``rid``. Filled by the engine's thread."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    on_finish: Callable[["GenerationRequest"], None]  # called once, in the engine's thread
    on_token: Callable[["GenerationRequest"], None] | None = None  # after each token but the last
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version: Version | None = None  # of the weights that sampled every token of this attempt
    finish_reason: dict[str, Any] | None = None  # SGLang's: {"type": "stop" | "length" | "abort", ...}
    error: str | None = None  # the engine failed; the request has no usable output
    abort_wanted: bool = False
    matcher: Any = None  # llguidance's, of a request with a JSON schema
    image_prompt: ImagePrompt | None = None  # of a request with images
