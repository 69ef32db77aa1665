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
"""Tells when a policy loses more than half of its groups to staleness: its workflows take too long for its versions."""


class StaleWatch:
    """Counts one policy's groups as they are taken or dropped as stale.

    Args:
        model_id: the policy.
        bound: its ``max_staleness``; ``None``: nothing is ever stale.
        holds: whether it has ``on_stale: hold``.
    """

    WINDOW = 32  # groups between two looks

    def __init__(self, model_id: str, bound: int | None, holds: bool):
        self._model_id = model_id
        self._remedy = "lower its lead (staleness_threshold)" if holds else "set on_stale: hold"
        self._bound = bound
        self._stale = self._taken = 0
        self._first: tuple[int, float] | None = None  # number of the first version that was seen, and when
        self._last: tuple[int, float] | None = None

    def moved(self, number: int, now: float) -> None:
        """A new version is served."""
        self._last = number, now
        self._first = self._first or self._last

    def took(self, stale: int, taken: int, workflow_s: float | None) -> str | None:
        """So many groups were dropped and taken; what to warn of, once per window.

        Args:
            stale: groups dropped.
            taken: groups taken.
            workflow_s: how long a workflow takes, in seconds; ``None``: not known.
        """
        self._stale += stale
        self._taken += taken
        groups, lost = self._stale + self._taken, self._stale
        if groups < self.WINDOW:
            return None
        self._stale = self._taken = 0
        if 2 * lost <= groups:
            return None
        return (
            f"policy {self._model_id} lost {lost} of its last {groups} groups as stale: a workflow takes "
            f"{_seconds(workflow_s)}, a version {_seconds(self._period_s)}, and max_staleness is {self._bound}; raise "
            f"it, {self._remedy}, or make fewer versions (trigger_parameter_sync_step)"
        )

    @property
    def _period_s(self) -> float | None:
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def _seconds(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.3g} s"
