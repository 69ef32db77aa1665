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
"""What a finished run reached: ``python -m recipe.multi_policy_async.run_summary RUN_DIR``.

Reads what the job wrote (``config/job.yaml``, ``metrics/steps.jsonl``, ``validation.jsonl``) and exits 1 unless every
trained policy reached the number of versions that its job asked for.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WINDOW = 3  # training steps over which the first and the last reward are averaged


@dataclass(frozen=True)
class PolicySummary:
    """One trained policy. ``target`` is None when the job did not stop by updates."""

    model_id: str
    version: int
    target: int | None
    steps: int
    first_reward: float
    last_reward: float

    @property
    def reached(self) -> bool:
        return self.steps > 0 and (self.target is None or self.version >= self.target)

    def __str__(self) -> str:
        aim = "" if self.target is None else f" of {self.target}"
        reward = f"reward {self.first_reward:.3f} -> {self.last_reward:.3f}" if self.steps else "no training step"
        return f"{self.model_id}: version {self.version}{aim}, {self.steps} steps, {reward}"


def summarize(run_dir: Path) -> list[PolicySummary]:
    """One summary per trained policy, in the order of the job.

    Raises:
        ValueError: the folder holds no run.
    """
    job_file = run_dir / "config" / "job.yaml"
    if not job_file.is_file():
        raise ValueError(f"{run_dir} holds no run: there is no config/job.yaml")
    job = yaml.safe_load(job_file.read_text())
    steps = _steps(run_dir / "metrics" / "steps.jsonl")
    trained = [model_id for model_id, policy in job["models"].items() if policy["train"]]
    return [_summary(model_id, job["models"][model_id], steps.get(model_id, [])) for model_id in trained]


def _steps(file: Path) -> dict[str, list[dict[str, Any]]]:
    steps: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        step = json.loads(line)
        steps.setdefault(step["model_id"], []).append(step)
    return steps


def _summary(model_id: str, policy: dict[str, Any], steps: list[dict[str, Any]]) -> PolicySummary:
    return PolicySummary(
        model_id=model_id,
        version=steps[-1]["version"] if steps else 0,  # not the highest: a restore goes back
        target=policy["target_updates"],
        steps=len(steps),
        first_reward=_mean(steps[:WINDOW]),
        last_reward=_mean(steps[-WINDOW:]),
    )


def describe_validation(run_dir: Path) -> list[str]:
    """A line for the first, the best and the last evaluation of the whole team; none without evaluations."""
    file = run_dir / "validation.jsonl"
    evaluations = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not evaluations:
        return []
    best = max(evaluations, key=lambda each: each["score"])
    chosen = {"first": evaluations[0], "best": best, "last": evaluations[-1]}
    return [f"validation, {name}: {_describe(each)}" for name, each in chosen.items()]


def _describe(evaluation: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{model_id} {first}" if first == (last := evaluation["last"][model_id]) else f"{model_id} {first} to {last}"
        for model_id, first in evaluation["first"].items()
    )
    failed = f", {evaluation['failed']} failed" if evaluation["failed"] else ""
    return f"score {evaluation['score']:.3f} of {evaluation['workflows']} workflows{failed}, by {versions or 'nobody'}"


def _mean(steps: list[dict[str, Any]]) -> float:
    return sum(step["reward"] for step in steps) / len(steps) if steps else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args(argv).run_dir
    try:
        policies = summarize(run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [*map(str, policies), *describe_validation(run_dir)]
    print("\n".join(lines) or "no policy was trained")
    return 0 if all(policy.reached for policy in policies) else 1


if __name__ == "__main__":
    sys.exit(main())
