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
"""Several simulations side by side: asynchronous against synchronous, and one resource more at a time."""

from collections.abc import Callable, Mapping, Sequence

from .job import simulate
from .measured import Run
from .report import MODES, bound_lines, table
from .scenario import Scenario

Compose = Callable[[Sequence[str]], Scenario]
"""Builds the scenario with overrides added."""


def compare_modes(compose: Compose, rounds: int) -> tuple[str, dict[str, list[Run]]]:
    """The scenario as it is and with ``ingest.schedule: sync``, in turn, each round with a seed of its own.

    Returns:
        The comparison as text, and the runs by mode.
    """
    seed = compose([]).simulation.seed
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        seeded = f"simulation.seed={seed + number}"
        runs[MODES[0]].append(simulate(compose([seeded])))
        runs[MODES[1]].append(simulate(compose([seeded, "ingest.schedule=sync"])))
    lines = [["rate", *MODES, "speed-up"]]
    lines.append(_speed_up("workflows/s", runs, lambda run: run.workflow_rate))
    for name in runs[MODES[0]][0].trained:
        lines.append(_speed_up(f"{name} rows/s", runs, lambda run, name=name: run.policies[name].trained_rate))
    shares = [["share of time", *MODES]]
    shares.append(["workflow slots in use", *_means(runs, lambda run: run.slots_in_use / run.slots, ".0%")])
    for name, policy in runs[MODES[0]][0].policies.items():
        shares.append([f"serving of {name}", *_means(runs, lambda r, name=name: r.policies[name].serving_busy, ".0%")])
        if policy.trained:
            shares.append([f"trainer of {name}", *_means(runs, lambda r, name=name: r.policies[name].busy, ".0%")])
    bounds = bound_lines(*(runs[mode][0] for mode in MODES))
    return "\n\n".join([table(lines), table(shares), "\n".join(bounds)]), runs


def what_if(compose: Compose, base: Run) -> str:
    """The scenario again with more of one resource, for each resource; gains against ``base``."""
    trained = list(base.trained)
    lines = [["with", "workflows/s", *(f"{name} rows/s" for name in trained)]]
    lines.append(["(as it is)", *(f"{rate:.2f}" for rate in _rates(base, trained))])
    for override in _resources(base.scenario):
        rates = _rates(simulate(compose([override])), trained)
        gains = (
            f"{rate:.2f} ({rate / before - 1:+.0%})" if before else f"{rate:.2f}"
            for rate, before in zip(rates, _rates(base, trained), strict=True)
        )
        lines.append([override, *gains])
    return table(lines)


def _resources(scenario: Scenario) -> list[str]:
    """Overrides that double a resource; the lead over training grows by a version's groups."""
    found = [f"workflow.max_concurrent={2 * scenario.workflow.max_concurrent}"]
    for name, policy in scenario.policies.items():
        found.append(f"policies.{name}.serving.replicas={2 * policy.serving.replicas}")
        if policy.train:
            training = f"policies.{name}.training"
            found.append(f"{training}.ranks={2 * policy.training.ranks}")
            found.append(f"{training}.staleness_threshold={policy.training.staleness_threshold + 1:g}")
    return found


def _rates(run: Run, names: Sequence[str]) -> list[float]:
    return [run.workflow_rate, *(run.policies[name].trained_rate for name in names)]


def _values(runs: Mapping[str, list[Run]], value: Callable[[Run], float]) -> list[float]:
    return [sum(map(value, runs[mode])) / len(runs[mode]) for mode in MODES]


def _means(runs: Mapping[str, list[Run]], value: Callable[[Run], float], form: str) -> list[str]:
    return [f"{mean:{form}}" for mean in _values(runs, value)]


def _speed_up(label: str, runs: Mapping[str, list[Run]], value: Callable[[Run], float]) -> list[str]:
    fast, slow = _values(runs, value)
    return [label, f"{fast:.2f}", f"{slow:.2f}", f"{fast / slow:.2f}x" if slow else "-"]
