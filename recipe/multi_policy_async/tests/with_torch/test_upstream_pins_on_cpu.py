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
"""The upstream methods that ``PolicyTrainer`` overrides or leans on are the ones it was written against."""

import hashlib
import inspect

import pytest

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineManager  # noqa: E402
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerManager  # noqa: E402

pytestmark = pytest.mark.slow

TRAINER = FullyAsyncTrainer.__ray_actor_class__

PINNED = {
    (TRAINER, "fit"): "b9016ef5d5245eca",
    (TRAINER, "_get_samples_from_queue"): "e58e648a6e47581d",
    (TRAINER, "_fit_update_local_step"): "59df88dad1002462",
    (TRAINER, "_fit_update_weights"): "76ccf91be688d9ef",
    (TRAINER, "_fit_collect_metrics"): "4180c12b81b804d1",
    (TRAINER, "_fit_postprocess_step"): "1f55ea16803946fb",
    (TRAINER, "_fit_save_checkpoint"): "c9a644df6e381188",
    (TRAINER, "_save_checkpoint"): "ecb422e3a226557e",
    (TRAINER, "load_checkpoint"): "8b629554aec63e25",
    (TRAINER, "_setup_checkpoint_manager"): "76802a6bc45db8e3",
    (TRAINER, "set_rollouter"): "8a3360efbdfef8aa",
    (RayPPOTrainer, "_update_actor"): "95f80caf7cbafdcf",
    (RayPPOTrainer, "_update_critic"): "43a77aad40105ee1",
    (CheckpointEngineManager, "update_weights"): "7dc90230efef777a",
    (LLMServerManager, "_init_global_load_balancer"): "cc3dcac74089a597",
}


def digest(owner: type, name: str) -> str:
    return hashlib.sha256(inspect.getsource(getattr(owner, name)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("owner", "name"), PINNED, ids=[f"{o.__name__}.{n}" for o, n in PINNED])
def test_the_upstream_method_is_the_one_the_override_was_written_against(owner, name):
    assert digest(owner, name) == PINNED[owner, name], (
        f"{owner.__name__}.{name} changed upstream: read it, adapt runtime/, then pin the new digest"
    )
