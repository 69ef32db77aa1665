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
"""A worker group that answers ``CheckpointEngineManager`` as verl's trainer workers do, over a tiny model."""

import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from recipe.multi_policy_async.backends.cpu.gloo_checkpoint_engine import GlooCheckpointEngine
from recipe.multi_policy_async.tests.tiny_qwen3 import tiny_qwen3


class WeightSender(Worker):
    def __init__(self, seed: int):
        super().__init__()
        self.checkpoint_engine = GlooCheckpointEngine(1 << 16, is_master=self.rank == 0, checksum=True, timeout_s=30)
        self._model = tiny_qwen3(seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        return await self.checkpoint_engine.send_weights(iter(self._model.state_dict().items()))

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


def make_sender_group(seed: int, ranks: int) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=True, max_colocate_count=1, name_prefix=f"senders_{seed}_")
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(WeightSender), seed=seed),
        device_name="cpu",
    )
