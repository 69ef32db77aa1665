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
"""What verl's trainer holds besides its own parts, cut down to what it asks of them.

Each class names the upstream gap that makes it necessary.
"""

from collections.abc import Callable
from typing import Any

import ray
from verl.utils import tensordict_utils as tu

from .batch_assembly import AssembledBatch


class UpdateGroup:
    """The actor's (or critic's) worker group, with the real batch's mini-batches and denominators put in.

    Upstream gap: ``RayPPOTrainer._update_actor`` (ppo/ray_trainer.py:1352) divides by a constant and cuts a constant
    number of rows, which is wrong for any other number of rows, and counts padding.
    """

    def __init__(self, group: Any):
        self._group = group
        self.batch: AssembledBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _with_denominators(self, data: Any) -> Any:
        assert self.batch is not None, "a batch was taken before the update"
        data.pop("mini_batch_size", None)
        tu.assign_non_tensor(
            data, num_mini_batch=self.batch.updates, global_batch_size=self.batch.real_rows / self.batch.updates
        )
        return data

    def update_actor(self, data: Any) -> Any:
        return self._group.update_actor(self._with_denominators(data))

    def train_mini_batch(self, data: Any) -> Any:
        return self._group.train_mini_batch(self._with_denominators(data))


class QueueSizePort:
    """What upstream asks its queue client for at the end of a step: the backlog, in groups."""

    def __init__(self):
        self.groups = 0

    def get_queue_size_sync(self) -> int:
        return self.groups


class _RemoteMethod:
    """A local function under the calling convention of an actor method."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        return ray.put(self._function(*args, **kwargs))


class RollouterPort:
    """What ``FullyAsyncTrainer`` calls on its rollouter, answered in the trainer's own process.

    Upstream gap: the trainer wants an actor handle for numbers that here belong to the ingestor and the workflow
    driver. An actor per model that imports nothing and knows nothing would be one more process.
    """

    def __init__(self):
        zero = _RemoteMethod(lambda *_: 0)
        nothing = _RemoteMethod(lambda *_: None)
        self.get_total_produced_samples = zero
        self.get_completed_steps = zero
        self.reset_staleness = _RemoteMethod(dict)
        self.save_checkpoint = nothing
        self._start_profiling = nothing
        self._stop_profiling = nothing
