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
"""verl's advantage estimators on padded batches: which ones a policy may use."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

from ...configuration.training_checks import ESTIMATORS, REFUSED_ESTIMATORS  # noqa: E402

pytestmark = pytest.mark.slow


def test_every_estimator_of_verl_is_judged():
    assert set(core_algos.AdvantageEstimator) == {*ESTIMATORS, *REFUSED_ESTIMATORS}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_does_not_change_the_advantages_of_real_rows(name):
    np.testing.assert_allclose(advantages(name, pads=5), advantages(name, pads=0), rtol=1e-5, atol=1e-6)


def test_padding_changes_those_of_gpg():
    """What the refusal is for."""
    assert not np.allclose(advantages("gpg", pads=5), advantages("gpg", pads=0))


def advantages(name: str, pads: int) -> np.ndarray:
    """verl's advantages ``[8, 4]`` of groups of five and three rows, with padding rows as batch assembly makes them."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([4, 2, 3, 1, 4, 4, 2, 3] + [0] * pads)
    mask = (torch.arange(4) < lengths[:, None]).long()
    rewards = torch.zeros(mask.shape)
    rewards[range(8), lengths[:8] - 1] = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, 0.0])
    values = torch.rand((8, 4), generator=draw)
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_rewards": rewards,
            "values": torch.cat([values, torch.full((pads, 4), 7.0)]),
        },
        non_tensors={"uid": np.array(["a/p"] * 5 + ["b/p"] * 3 + [f"pad-{i}" for i in range(pads)], dtype=object)},
    )
    config = AlgoConfig(adv_estimator=name)
    return compute_advantage(data, name, gamma=0.9, lam=0.8, config=config).batch["advantages"][:8].numpy()
