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
"""The table of ``compare.py``."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOWS = 3  # of the reward curve
PARTS_SHOWN = 8  # rows of the CPU table, the rest is summed up


@dataclass(frozen=True)
class Step:
    """One trained step; ``time`` is unix seconds at its end."""

    version: int
    reward: float
    time: float


@dataclass(frozen=True)
class Measured:
    """One run of one arm."""

    arm: str
    round: int
    first_step_s: float  # from process start
    steps: list[Step]
    processes: int
    pss_gb: float
    cpu_s_per_step: dict[str, float]  # by process name

    def seconds_per_step(self, skip: int) -> float:
        """Wall time from the end of step ``skip`` to the end of the last one, by step."""
        return (self.steps[-1].time - self.steps[skip - 1].time) / (len(self.steps) - skip)

    def windows(self) -> list[float]:
        """Mean reward of each of the ``WINDOWS`` parts of the run."""
        ends = [len(self.steps) * part // WINDOWS for part in range(WINDOWS + 1)]
        rewards = [step.reward for step in self.steps]
        return [statistics.fmean(rewards[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def noise(runs: Sequence[Measured]) -> float:
    """Standard deviation of one step's mean reward around the curve, from the differences of neighbours."""
    squares = [(b.reward - a.reward) ** 2 for run in runs for a, b in zip(run.steps, run.steps[1:], strict=False)]
    return math.sqrt(statistics.fmean(squares) / 2)


def report(runs: Sequence[Measured], baseline: str, skip: int) -> tuple[str, dict[str, Any]]:
    """The tables as text, and all numbers.

    Args:
        runs: of all arms; every round has one run of each.
        baseline: the arm that the others are compared with.
        skip: first steps that do not count.
    """
    arms = list(dict.fromkeys(run.arm for run in runs))
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    rows = [("", *arms)]

    def add(title: str, values: dict[str, str]) -> None:
        rows.append((title, *(values[arm] for arm in arms)))

    seconds = {arm: [run.seconds_per_step(skip) for run in by_arm[arm]] for arm in arms}
    ratios = {arm: [own / base for own, base in zip(seconds[arm], seconds[baseline], strict=True)] for arm in arms}
    add("seconds per step, by round", {arm: _list(seconds[arm], 2) for arm in arms})
    add("  mean", {arm: f"{statistics.fmean(seconds[arm]):.2f}" for arm in arms})
    add(f"  over {baseline}, by round", {arm: _list(ratios[arm], 2) for arm in arms})
    add("  of the means", {arm: f"{sum(seconds[arm]) / sum(seconds[baseline]):.3f}" for arm in arms})
    add("first step after, s", {arm: _list([run.first_step_s for run in by_arm[arm]], 1) for arm in arms})
    add("processes", {arm: _list([run.processes for run in by_arm[arm]], 0) for arm in arms})
    add("memory (PSS), GB", {arm: _list([run.pss_gb for run in by_arm[arm]], 2) for arm in arms})
    cpu = {arm: _mean_cpu(by_arm[arm]) for arm in arms}
    add("CPU seconds per step", {arm: f"{sum(cpu[arm].values()):.2f}" for arm in arms})

    curves = {
        arm: [statistics.fmean(part) for part in zip(*(r.windows() for r in by_arm[arm]), strict=True)] for arm in arms
    }
    error = {arm: noise(by_arm[arm]) / math.sqrt(sum(len(r.steps) for r in by_arm[arm]) / WINDOWS) for arm in arms}
    for part in range(WINDOWS):
        add(
            f"reward, part {part + 1} of {WINDOWS}",
            {arm: f"{curves[arm][part]:.3f} +- {2 * error[arm]:.3f}" for arm in arms},
        )
    text = "\n".join([_table(rows), "", *(_cpu_table(arm, cpu[arm]) for arm in arms)])
    return text, {
        "seconds_per_step": seconds,
        "ratio_by_round": ratios,
        "ratio": {arm: sum(seconds[arm]) / sum(seconds[baseline]) for arm in arms},
        "reward_windows": curves,
        "reward_standard_error": error,
        "cpu_seconds_per_step": cpu,
        "runs": [asdict(run) for run in runs],
    }


def _mean_cpu(runs: Sequence[Measured]) -> dict[str, float]:
    names = {name for run in runs for name in run.cpu_s_per_step}
    means = {name: statistics.fmean(run.cpu_s_per_step.get(name, 0.0) for run in runs) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _cpu_table(arm: str, cpu: dict[str, float]) -> str:
    shown = list(cpu.items())[:PARTS_SHOWN]
    rest = sum(cpu.values()) - sum(seconds for _, seconds in shown)
    lines = [f"  {seconds:6.3f}  {name}" for name, seconds in [*shown, ("others", rest)]]
    return "\n".join([f"CPU seconds per step, {arm}", *lines, ""])


def _list(values: Sequence[float], digits: int) -> str:
    return "  ".join(f"{value:.{digits}f}" for value in values)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
