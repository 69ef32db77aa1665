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
"""Numbers of a run -> a table, ratios and a verdict per target."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from .phases import SIDES

TARGETS = {
    "added p50 at half the saturation rate, ms": 5.0,
    "added p99 at half the saturation rate, ms": 20.0,
    "gateway CPU per request at that rate, ms": 1.5,
}
FLAT_KB_PER_REQUEST = 4.0  # what is remembered of a closed workflow, so that finalize can be asked again, is bounded


def _median(phases: Iterable[dict[str, Any]], side: str, value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(value(phase) for phase in phases if phase["side"] == side)


def summarize(phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one comparison; what relay and gateway add, and their shares of the router's rate."""
    values: dict[str, Any] = {
        f"{side}_{name}": _median(phases, side, lambda phase, name=name: phase[name])
        for side in SIDES
        for name in ("p50_ms", "p99_ms", "rate")
    }
    by_round: dict[int, dict[str, dict[str, Any]]] = {}
    for phase in phases:
        by_round.setdefault(phase["round"], {})[phase["side"]] = phase
    for side in ("relay", "gateway"):
        pairs = [(turn["router"], turn[side]) for turn in by_round.values()]
        for name in ("p50_ms", "p99_ms"):
            added = [measured[name] - router[name] for router, measured in pairs]
            values |= {f"{side}_added_{name}": statistics.median(added), f"{side}_added_{name}_by_round": added}
        ratios = [measured["rate"] / router["rate"] for router, measured in pairs]
        values[f"{side}_rate_ratio"] = statistics.median(ratios)
    for side in SIDES:
        values[f"{side}_cpu_ms"] = _median(phases, side, lambda phase, side=side: phase["cpu_ms"][side])
    cpu = [turn["gateway"]["cpu_ms"]["gateway"] / turn["relay"]["cpu_ms"]["relay"] for turn in by_round.values()]
    return values | {"cpu_to_relay": statistics.median(cpu)}


def verdicts(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """Target -> (met, what was measured)."""
    soak, open_loop, rows, engines = result["soak"], result["open_loop"], result["rows"], result["engines"]
    phases = [soak, *result["phases"]]
    failed, astray = sum(p["not_2xx"] for p in phases), sum(p["misrouted"] for p in phases)
    found: dict[str, tuple[bool, str]] = {
        "no answer but 2xx": (failed == 0, f"{failed} of {result['requests']}"),
        "nothing misrouted": (
            astray == engines["misrouted"] == 0,
            f"{astray} answers, {engines['misrouted']} prompts at engines",
        ),
        "every request sampled once": (
            engines["generated"] == result["requests"],
            f"{engines['generated']} of {result['requests']}",
        ),
        "every row once, as sampled": (
            rows["every_workflow_once"] and rows["wrong"] == 0 and rows["rows"] == rows["calls"],
            f"{rows['rows']} rows of {rows['calls']} calls, {rows['wrong']} wrong, {rows['records']} records of "
            f"{rows['workflows']} workflows",
        ),
        "flat memory": (
            soak["rss_kb_per_request"] < FLAT_KB_PER_REQUEST,
            f"{soak['rss_kb_per_request']:+.2f} KB per request once settled, {soak['rss_mb']['end']:.0f} MB at the end",
        ),
    }
    measured = [open_loop[f"gateway_{name}"] for name in ("added_p50_ms", "added_p99_ms", "cpu_ms")]
    for (name, limit), value in zip(TARGETS.items(), measured, strict=True):
        found[name] = (value < limit, f"{value:.2f} (below {limit:g})")
    return found


def soak_line(soak: dict[str, Any]) -> str:
    """One sentence on the many open workflows."""
    memory = soak["rss_mb"]
    return (
        f"{soak['workflows_open']} workflows open, {soak['requests']} requests: {soak['rate']:.0f}/s, "
        f"{soak['cpu_ms_per_request_all_included']:.2f} CPU-ms per request with finalize and creation, "
        f"{soak['cpu_ms_per_creation']:.2f} per creation; memory {memory['begin']:.0f} -> {memory['settled']:.0f} -> "
        f"{memory['end']:.0f} MB, {soak['rss_kb_per_request']:+.2f} KB per request once settled"
    )


COLUMNS = (
    "load",
    "router p50 / p99 ms",
    "relay adds p50, p99 ms",
    "gateway adds p50 ms (rounds)",
    "gateway adds p99 ms (rounds)",
    "rate / router's (relay's)",
    "CPU-ms gateway, relay, router",
    "gateway / relay CPU",
)


def comparison_line(load: str, row: dict[str, Any]) -> str:
    """One row of the table."""
    cells = (
        load,
        f"{row['router_p50_ms']:.1f} / {row['router_p99_ms']:.1f}",
        f"{row['relay_added_p50_ms']:.2f}, {row['relay_added_p99_ms']:.2f}",
        f"{row['gateway_added_p50_ms']:.2f} ({_list(row['gateway_added_p50_ms_by_round'])})",
        f"{row['gateway_added_p99_ms']:.2f} ({_list(row['gateway_added_p99_ms_by_round'])})",
        f"{row['gateway_rate_ratio']:.2f} ({row['relay_rate_ratio']:.2f}), {row['gateway_rate']:.0f}/s",
        ", ".join(f"{row[f'{side}_cpu_ms']:.2f}" for side in ("gateway", "relay", "router")),
        f"{row['cpu_to_relay']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def report(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{key}: {value}" for key, value in result["setting"].items()]
    lines += ["", soak_line(result["soak"]), "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [comparison_line(f"{c} at once", row) for c, row in result["closed_loop"].items()]
    open_loop = result["open_loop"]
    lines += [comparison_line(f"{open_loop['asked_rate']:.0f}/s", open_loop), ""]
    lines += [f"{'PASS' if met else 'MISS'}  {name}: {what}" for name, (met, what) in verdicts(result).items()]
    return "\n".join(lines)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
