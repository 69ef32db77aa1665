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
"""verl's trainer workers on gloo, and its FSDP2 engines for device ``cpu``.

Importing this module registers the engines; Ray imports it in every worker that runs one of the classes.
"""

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker

from .process_group import init_process_group


class _WithoutPinnedMemory:
    """Builds forward-only models without the CPU offload policy, whose pinned memory needs an accelerator (O7)."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        forward_only = self.engine_config.forward_only
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class CpuFSDP2Engine(_WithoutPinnedMemory, FSDPEngineWithLMHead):
    """verl's FSDP2 engine for policies (``verl/workers/engine/fsdp/transformer_impl.py``), on gloo (O3)."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp2"], device=["cpu"])
class CpuFSDP2ValueEngine(_WithoutPinnedMemory, FSDPEngineWithValueHead):
    """verl's FSDP2 engine for critics, on gloo (O3)."""


class CpuTrainingWorker(TrainingWorker):
    """verl's ``TrainingWorker`` (``verl/workers/engine_workers.py``) on gloo."""

    def __init__(self, *args, **kwargs):
        init_process_group()
        super().__init__(*args, **kwargs)


class CpuDetachActorWorker(DetachActorWorker):
    """verl's ``DetachActorWorker`` (``verl/experimental/separation/engine_workers.py``) on gloo."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    def __init__(self, *args, **kwargs):
        init_process_group()
        super().__init__(*args, **kwargs)
