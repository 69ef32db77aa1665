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
"""Reward curves of several runs side by side: ``python -m recipe.multi_policy_async.assets.plot_curves --help``.

Reads ``metrics/steps.jsonl`` of each run directory (one line per training step per policy, multi_model_metrics.py), or
any JSONL file whose lines hold a step and a reward, verl's own ``{"step": ..., "data": {...}}`` included
(verl/utils/tracking.py:FileLogger). A curve is the mean reward by weight version, over the policies that trained it:
with a team reward all policies of a run report the same episodes. Torch-free.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS_FILE = Path("metrics", "steps.jsonl")

Curve = dict[int, float]
"""Weight version (or step) -> mean reward of the batch that led to it."""


@dataclass(frozen=True)
class Rise:
    """Mean over the first and over the last versions of a curve."""

    start: float
    end: float

    @property
    def gain(self) -> float:
        return self.end - self.start


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """``record[key]``, also below verl's ``data``; ``None`` where it is missing."""
    if key in record:
        return record[key]
    data = record.get("data")
    return data.get(key) if isinstance(data, Mapping) else None


def read_curve(path: Path, step_key: str, reward_key: str) -> Curve:
    """The curve of one run directory, or of one JSONL file. Lines without both keys are passed over.

    Raises:
        ValueError: there is no such file, or no line of it has both keys.
    """
    file = path / STEPS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    rewards: dict[int, list[float]] = defaultdict(list)
    for line in file.read_text().splitlines():
        record = json.loads(line)
        step, reward = lookup(record, step_key), lookup(record, reward_key)
        if step is not None and reward is not None:
            rewards[int(step)].append(float(reward))
    if not rewards:
        raise ValueError(f"{file}: no line has both {step_key!r} and {reward_key!r}")
    return {step: sum(values) / len(values) for step, values in sorted(rewards.items())}


def rise(curve: Curve, window: int) -> Rise:
    """Start and end of a curve, each the mean of ``window`` versions."""
    values = list(curve.values())
    first, last = values[:window], values[-window:]
    return Rise(sum(first) / len(first), sum(last) / len(last))


def table(curves: Mapping[str, Curve], window: int) -> str:
    """All curves by version, then start, end and gain of each."""
    width = max(8, *(len(name) for name in curves))
    lines = ["version  " + "  ".join(f"{name:>{width}}" for name in curves)]
    for step in sorted({step for curve in curves.values() for step in curve}):
        cells = (f"{curve[step]:{width}.3f}" if step in curve else " " * width for curve in curves.values())
        lines.append(f"{step:>7}  " + "  ".join(cells))
    rises = [rise(curve, window) for curve in curves.values()]
    for label in ("start", "end", "gain"):
        lines.append(f"{label:>7}  " + "  ".join(f"{getattr(r, label):{width}.3f}" for r in rises))
    return "\n".join(line.rstrip() for line in lines)


def failures(curves: Mapping[str, Curve], window: int, min_gain: float | None, min_lead: float | None) -> list[str]:
    """What the first curve misses: its own gain, and its lead in gain over each other curve."""
    (first, *others) = ((name, rise(curve, window)) for name, curve in curves.items())
    name, best = first
    missed = []
    if min_gain is not None and best.gain < min_gain:
        missed.append(f"{name} gained {best.gain:.3f}, less than {min_gain}")
    for other, other_rise in others:
        if min_lead is not None and best.gain - other_rise.gain < min_lead:
            missed.append(f"{name} gained {best.gain - other_rise.gain:.3f} more than {other}, less than {min_lead}")
    return missed


def plot(curves: Mapping[str, Curve], out: Path, window: int) -> None:
    """Write a PNG: points by version, and their trailing mean over ``window`` versions as lines."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name, curve in curves.items():
        steps, values = list(curve), list(curve.values())
        smooth = [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
        (line,) = axes.plot(steps, smooth, label=name)
        axes.plot(steps, values, ".", color=line.get_color(), alpha=0.4)
    axes.set(xlabel="weight version", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def parse_run(text: str) -> tuple[str, Path]:
    """``name=path``.

    Raises:
        argparse.ArgumentTypeError: no ``=`` in the text.
    """
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=path")
    return name, Path(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=parse_run, metavar="NAME=PATH", help="run directory or JSONL file")
    parser.add_argument("--png", type=Path, help="write the picture there (needs matplotlib)")
    parser.add_argument("--step-key", default="version")
    parser.add_argument("--reward-key", default="reward")
    parser.add_argument("--window", type=int, default=3, help="versions that start, end and smoothing average over")
    parser.add_argument("--min-gain", type=float, help="fail when the first run gains less")
    parser.add_argument("--min-lead", type=float, help="fail when the first run gains less than this more than another")
    args = parser.parse_args(argv)
    try:
        curves = {name: read_curve(path, args.step_key, args.reward_key) for name, path in args.runs}
    except ValueError as error:
        sys.exit(f"plot_curves: {error}")
    print(table(curves, args.window))
    if args.png:
        plot(curves, args.png, args.window)
        print(f"picture: {args.png}")
    missed = failures(curves, args.window, args.min_gain, args.min_lead)
    if missed:
        sys.exit("FAIL: " + "; ".join(missed))


if __name__ == "__main__":
    main()
