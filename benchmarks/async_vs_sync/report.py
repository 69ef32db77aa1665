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
"""The tables of ``compare.py``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from recipe.multi_policy_async.simulator.report import MODES, allowed, bound_lines, policy_table, table

from .measured import CORES, JobRun


def run_lines(run: JobRun) -> str:
    """What one run did, as the simulator tells it, and what the cores did."""
    cpu = ", ".join(f"{stage} {cores:.2f}" for stage, cores in sorted(run.cpu.items(), key=lambda item: -item[1]))
    return "\n".join(
        [
            f"measured: {run.seconds:.1f} s; seconds per version: {by_policy(run.seconds_per_version, '.2f')}",
            f"workflows: {run.workflow_rate:.2f}/s, {run.slots_in_use:.1f} of {run.slots} slots in use",
            allowed(run.workflow_bounds),
            f"cores in use: {run.cores_busy * run.cores:.2f} of {run.cores} ({cpu}); the whole machine "
            f"{run.machine:.2f}",
            policy_table(run),
        ]
    )


def summary(runs: Mapping[str, Sequence[JobRun]]) -> str:
    """Means over rounds by mode, the speed-up by round, and what bounds each mode."""
    lines = [["", *MODES, "speed-up by round", "median"]]
    names = list(runs[MODES[0]][0].trained)
    for name in names:
        lines.append(_speed_up(f"{name} rows/s", runs, lambda run, name=name: run.policies[name].trained_rate))
    lines.append(_speed_up("workflows/s", runs, lambda run: run.workflow_rate))

    def add(label: str, value: Callable[[JobRun], float], form: str) -> None:
        lines.append([label, *(f"{mean:{form}}" for mean in _means(runs, value)), "", ""])

    for name in names:
        add(f"{name} s per version", lambda run, name=name: run.seconds_per_version[name], ".2f")
    for name in names:
        for phase in ("train", "sync", "wait"):
            add(f"{name} {phase}", lambda run, name=name, phase=phase: run.policies[name].phases[phase], ".0%")
        add(f"{name} servers' slots", lambda run, name=name: run.policies[name].serving_busy, ".0%")
        add(f"{name} staleness, mean", lambda run, name=name: run.policies[name].staleness_mean, ".2f")
        add(f"{name} rows dropped", lambda run, name=name: float(sum(run.policies[name].dropped.values())), ".0f")
    add("workflow slots", lambda run: run.slots_in_use / run.slots, ".0%")
    add("cores, this job", lambda run: run.cores_busy, ".0%")
    add("cores, whole machine", lambda run: run.machine / run.cores, ".0%")
    others = [" ".join(f"{run.disturbance:.2f}" for run in runs[mode]) for mode in MODES]
    lines.append(["cores of other programs, by round", *others, "", ""])
    add("CPU s per workflow", lambda run: cpu_per_workflow(run), ".3f")
    return "\n".join([table(lines), *bounds(runs)])


def bounds(runs: Mapping[str, Sequence[JobRun]]) -> list[str]:
    """Which stage bounds each mode, and whether the cores do, by the run that other programs disturbed least."""
    fast, slow = (min(runs[mode], key=lambda run: run.disturbance) for mode in MODES)
    return [f"{line}; {describe_cores(run)}" for line, run in zip(bound_lines(fast, slow), (fast, slow), strict=True)]


def describe_cores(run: JobRun) -> str:
    """Whether the stages had cores enough."""
    if run.bound_by_cores:
        return f"all stages by the {CORES}, {run.machine / run.cores:.0%} busy"
    return f"{CORES} were free, {run.machine / run.cores:.0%} busy"


def cpu_per_workflow(run: JobRun) -> float:
    """CPU seconds of the whole job over the workflows that ended meanwhile: what cores are needed for."""
    return run.cores_busy * run.cores / run.workflow_rate if run.workflow_rate else 0.0


def by_policy(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())


def as_dict(run: JobRun) -> dict[str, Any]:
    """The numbers, for files."""
    return {**asdict(run), "workflow_bounds": run.workflow_bounds}


def _means(runs: Mapping[str, Sequence[JobRun]], value: Callable[[JobRun], float]) -> list[float]:
    return [fmean(map(value, runs[mode])) for mode in MODES]


def _speed_up(label: str, runs: Mapping[str, Sequence[JobRun]], value: Callable[[JobRun], float]) -> list[str]:
    fast, slow = _means(runs, value)
    ratios = [value(a) / value(b) for a, b in zip(*(runs[mode] for mode in MODES), strict=True)]
    return [label, f"{fast:.2f}", f"{slow:.2f}", " ".join(f"{ratio:.2f}" for ratio in ratios), f"{median(ratios):.2f}x"]
