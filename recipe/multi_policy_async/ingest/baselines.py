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
"""Running statistics of an agent's rewards: what a row is compared with where its group is too small for that.

A group below ``min_group_size`` says little about what was to be expected of its members. With ``on_small_group: ema``
each of them is compared with an exponential moving average of its agent's rewards instead, a baseline such as REINFORCE
allows (Williams, 1992; doi:10.1007/BF00992696).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

EPSILON = 1e-6
"""Added to a deviation before dividing by it, as verl does (``core_algos.py:compute_grpo_outcome_advantage``)."""

AgentOfModel = tuple[str, str]
"""(model id, agent id)."""


@dataclass(frozen=True)
class Baseline:
    """Moving average and variance of one agent's rewards."""

    rewards: int = 0  # observed so far
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, reward: float, decay: float) -> "Baseline":
        """Take a reward in; the first ones weigh alike, later ones forget at ``decay``.

        The variance follows from adding a point with weight ``w`` at distance ``d`` from the mean: the mean moves by
        ``w d``, what is left of the old spread and the new point have the variance ``(1 - w) (variance + w d^2)``.
        """
        weight = max(1 / (self.rewards + 1), 1 - decay)
        distance = reward - self.mean
        return Baseline(
            rewards=self.rewards + 1,
            mean=self.mean + weight * distance,
            variance=(1 - weight) * (self.variance + weight * distance**2),
        )

    def advantage(self, reward: float, *, by_std: bool) -> float:
        """How much better ``reward`` is than what was to be expected, in deviations if ``by_std``.

        Where the average has taken in this very reward, with weight ``w``, that scales the difference by ``1 - w``:
        with ``m`` the average without it, ``r - (m + w (r - m)) = (1 - w) (r - m)``. And it bounds the advantage by
        ``sqrt((1 - w) / w)`` deviations, as in a group of ``1 / w`` members, however alike all other rewards are.
        """
        difference = reward - self.mean
        return difference / (self.variance**0.5 + EPSILON) if by_std else difference


def observed(
    baselines: Mapping[AgentOfModel, Baseline], rewards: Iterable[tuple[AgentOfModel, float, float]]
) -> dict[AgentOfModel, Baseline]:
    """The baselines that change when ``rewards`` (whose, how much, with which decay) arrive, in order."""
    changed: dict[AgentOfModel, Baseline] = {}
    for key, reward, decay in rewards:
        changed[key] = changed.get(key, baselines.get(key, Baseline())).observe(reward, decay)
    return changed
