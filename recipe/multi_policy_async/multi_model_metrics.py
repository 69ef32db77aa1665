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
"""What a person sees: one aligned line per training step per policy, a pipeline line every few seconds, a summary."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # trainers import this module too and need no HTTP client
    from .validation_scheduler import Evaluation


@dataclass(frozen=True)
class StepReport:
    """One training step of one policy. Times are unix seconds, durations seconds."""

    model_id: str
    version: int
    reward: float
    staleness_mean: float
    staleness_max: int
    rows: int
    step_seconds: float
    train_seconds: float
    time: float
    incarnation: int = 0  # of the version; after a restore version numbers are used again


@dataclass(frozen=True)
class PhaseReport:
    """A policy's trainer entered a phase: ``wait`` for data, ``train``, ``hold`` before a sync, ``sync``, ``save``; or
    ``ended``."""

    model_id: str
    phase: str
    version: int
    time: float


def describe_versions(evaluation: "Evaluation") -> str:
    """``planner_model version 4, solver_model versions 3-5``: which weights answered."""
    parts = []
    for model_id, first in evaluation.report.first.items():
        oldest, newest = first.number, evaluation.report.last[model_id].number
        span = f"version {oldest}" if oldest == newest else f"versions {oldest}-{newest}"
        parts.append(f"{model_id} {span}")
    return ", ".join(parts)


class JobMetrics:
    """Writes the console lines and the run directory's ``metrics/steps.jsonl``, ``metrics/pipeline.jsonl`` and
    ``validation.jsonl``.

    Args:
        run_dir: where the files go.
        model_ids: for the width of the columns.
        out: the console.
    """

    def __init__(self, run_dir: Path, model_ids: list[str], out: TextIO = sys.stdout):
        self._out = out
        self._width = max(len(model_id) for model_id in model_ids)
        self._started = time.monotonic()
        self._run_dir = run_dir
        (run_dir / "metrics").mkdir(parents=True, exist_ok=True)

    def step(self, report: StepReport, counts: Mapping[str, Any]) -> None:
        """Print and record a training step; ``counts`` are the ingestor's numbers for this model."""
        dropped = counts["dropped"]
        reasons = " ".join(f"{reason}:{n}" for reason, n in sorted(dropped.items()) if n)
        self._print(
            f"{report.model_id:<{self._width}}  version {report.version:>4}  reward {report.reward:6.3f}  "
            f"stale {report.staleness_mean:4.1f}/{report.staleness_max:<2}  queue {counts['queue_groups']:>3}  "
            f"trained {counts['trained']:>6}  dropped {sum(dropped.values()):>4}"
            f"{' (' + reasons + ')' if reasons else ''}  {report.step_seconds:6.2f} s"
        )
        self._append("metrics/steps.jsonl", {**asdict(report), "counts": dict(counts)})

    def pipeline(self, workflows: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> None:
        """Print and record the state of the whole pipeline."""
        parts = [
            f"{model_id}: {m['running']}{_of(m.get('limit'))} in flight, "
            f"{m['queue_groups']} groups queued, {m['state']}"
            for model_id, m in models.items()
        ]
        score = workflows["score_mean"]
        blocked = f" ({workflows['blocked']} blocked)" if workflows["blocked"] else ""
        state = f", {workflows['state']}" if workflows["state"] != "producing" else ""
        self._print(
            f"{'pipeline':<{self._width}}  workflows {workflows['running']} running{blocked}, "
            f"{workflows['finished']} finished, {workflows['failed']} failed"
            + (f", score {score:.3f}" if score is not None else "")
            + f"{state} | {' | '.join(parts)}"
        )
        self._append(
            "metrics/pipeline.jsonl", {"time": time.time(), "workflows": dict(workflows), "models": dict(models)}
        )

    def validation(self, evaluation: "Evaluation") -> None:
        """Print and record an evaluation of the whole team."""
        report = evaluation.report
        rewards = ", ".join(f"{agent} {reward:.3f}" for agent, reward in report.rewards.items())
        self._print(
            f"{'validation':<{self._width}}  score {report.score:.3f}"
            f"{' (' + rewards + ')' if rewards else ''}  {report.workflows} workflows, {report.failed} failed  "
            f"{describe_versions(evaluation)}  {report.seconds:.1f} s, {evaluation.occasion}"
        )
        record = {"time": time.time(), "occasion": evaluation.occasion, "updates": evaluation.updates, **asdict(report)}
        for vector in ("first", "last"):
            record[vector] = {model_id: str(version) for model_id, version in getattr(report, vector).items()}
        self._append("validation.jsonl", record)

    def note(self, text: str) -> None:
        """Print a line that is no measurement."""
        self._print(text)

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=self._out, flush=True)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._run_dir / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {limit}"
