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
"""Is an advantage estimator that verl does not ship one that our batches can be given to?

Users register theirs with verl (``core_algos.register_adv_est``) in a module that VERL_USE_EXTERNAL_MODULES names. verl
looks it up in its first step, and whether it counts padding rows nobody would ever see. So both are tried beforehand.
"""

import numpy as np
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage

_REWARDS = {"a": (1.0, 0.0, 0.5), "b": (0.25, 1.0)}  # two groups of different size
_LENGTHS = (3, 1, 2, 3, 2)


def check_estimator(name: str, algorithm: DictConfig) -> None:
    """Try ``algorithm.adv_estimator`` on a small batch, with and without padding rows.

    Args:
        name: of the estimator.
        algorithm: the policy's ``algorithm`` section.

    Raises:
        ValueError: no module registered it, or padding changes its advantages of real rows.
    """
    try:
        get_adv_estimator_fn(name)
    except ValueError as error:
        raise ValueError(
            f"algorithm.adv_estimator={name}: {error}; a module in VERL_USE_EXTERNAL_MODULES must register it with "
            "verl.trainer.ppo.core_algos.register_adv_est"
        ) from error
    if not torch.allclose(_advantages(name, algorithm, pads=3), _advantages(name, algorithm, pads=0), atol=1e-6):
        raise ValueError(
            f"algorithm.adv_estimator={name}: padding changes its advantages of other rows. Padding rows have an empty "
            "response_mask, zero reward and an index of their own; leave them out of counts and means"
        )


def _advantages(name: str, algorithm: DictConfig, pads: int) -> torch.Tensor:
    real = len(_LENGTHS)
    mask = (torch.arange(max(_LENGTHS)) < torch.tensor([*_LENGTHS, *[0] * pads])[:, None]).long()
    rewards = torch.zeros(mask.shape)
    rewards[range(real), torch.tensor(_LENGTHS) - 1] = torch.tensor([r for group in _REWARDS.values() for r in group])
    uids = [uid for uid, group in _REWARDS.items() for _ in group] + [f"pad-{i}" for i in range(pads)]
    data = DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_rewards": rewards},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )
    return compute_advantage(data, name, config=algorithm).batch["advantages"][:real]
