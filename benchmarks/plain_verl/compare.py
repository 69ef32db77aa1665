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
"""Plain verl against this recipe with one policy: the same model, data and settings, alternating.

    python -m benchmarks.plain_verl.compare --rounds 2 --steps 15
    python -m benchmarks.plain_verl.compare --upstreams sglang_router verl_client    # what HTTP path and router cost

Prints seconds per trained step, reward windows, time to the first step, processes, memory, and where the CPU time of a
step goes. The first steps are left out; so are two more after the last one measured, in which plain verl samples
nothing any more.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..process_tree import cpu_seconds, difference
from .prepare_tasks import write_plan_tasks
from .report import Measured, Step, report

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).resolve().parent / "config"
TAIL_STEPS = 2  # the lead with staleness_threshold=1: plain verl's last steps meet no sampling
POLL_S = 0.05
LONGEST_RUN_S = 900.0

PLAIN = "plain verl"


def command(arm: str, run_dir: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    """What runs ``arm``: plain verl, or the recipe with the gateway upstream of that name."""
    if arm == PLAIN:
        module = ["benchmarks.plain_verl.train", "--steps", str(steps), "--run-dir", str(run_dir)]
        return [sys.executable, "-m", *module, *overrides]
    recipe = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy"]
    recipe += ["--config-dir", str(CONFIG), "--config-name", "one_policy"]
    return [*recipe, f"run.dir={run_dir}", f"stop.updates={steps}", f"gateway.upstream={arm}", *overrides]


def measure(arm: str, round_: int, run_dir: Path, steps: int, skip: int, overrides: Sequence[str]) -> Measured:
    """Run one arm to its end and read its process tree on the way.

    Raises:
        SystemExit: it failed, or trained fewer steps than asked for.
    """
    log = run_dir.with_suffix(".log")
    started_at, started = time.time(), time.monotonic()
    steps_file = run_dir / "metrics" / "steps.jsonl"
    with log.open("w") as out:
        process = subprocess.Popen(
            command(arm, run_dir, steps + TAIL_STEPS, overrides), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT
        )
        root = psutil.Process(process.pid)
        before = after = None
        processes, pss = 0, 0
        while process.poll() is None:
            trained = count_lines(steps_file)
            if before is None and trained >= skip:
                before = cpu_seconds(root)
            if after is None and trained >= steps:
                after = cpu_seconds(root)
                processes, pss = len(after), memory(root)
            if time.monotonic() - started > LONGEST_RUN_S:
                process.terminate()
                process.wait(60)
                raise SystemExit(f"{arm}: no end after {LONGEST_RUN_S:.0f} s; {log}")
            time.sleep(POLL_S)
    records = read_steps(steps_file)
    if process.returncode != 0 or len(records) != steps + TAIL_STEPS or before is None or after is None:
        raise SystemExit(f"{arm}: exit code {process.returncode}, {len(records)} steps trained; {log}")
    return Measured(
        arm=arm,
        round=round_,
        first_step_s=records[0].time - started_at,
        steps=records[:steps],
        processes=processes,
        pss_gb=pss / 2**30,
        cpu_s_per_step={name: seconds / (steps - skip) for name, seconds in difference(before, after).items()},
    )


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def read_steps(file: Path) -> list[Step]:
    """The steps that either side wrote down, with the same keys."""
    if not file.exists():
        return []
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [Step(record["version"], record["reward"], record["time"]) for record in records]


def memory(root: psutil.Process) -> int:
    """PSS of the tree in bytes."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="trained steps of each run")
    parser.add_argument("--skip", type=int, default=3, help="first steps that are left out")
    parser.add_argument("--upstreams", nargs="+", choices=("sglang_router", "verl_client"), default=["sglang_router"])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / time.strftime("plain_verl-%Y%m%d-%H%M%S"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of config/one_policy.yaml")
    arguments = parser.parse_intermixed_args()
    if not 0 < arguments.skip < arguments.steps:
        parser.error("--skip must lie between 0 and --steps")
    out = arguments.out.resolve()
    write_plan_tasks(out / "tasks")
    overrides = [f"data.train_files={out}/tasks/train.parquet", *arguments.overrides]
    runs: list[Measured] = []
    for round_ in range(1, arguments.rounds + 1):
        for arm in (PLAIN, *arguments.upstreams):
            run_dir = out / f"{round_}-{arm.replace(' ', '_')}"
            run = measure(arm, round_, run_dir, arguments.steps, arguments.skip, overrides)
            runs.append(run)
            print(
                f"round {round_}  {arm:<14} {run.seconds_per_step(arguments.skip):6.2f} s per step, first after "
                f"{run.first_step_s:5.1f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    text, numbers = report(runs, PLAIN, arguments.skip)
    print(f"\n{text}")
    result = {"steps": arguments.steps, "skip": arguments.skip, "overrides": arguments.overrides, **numbers}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{out / 'result.json'}")


if __name__ == "__main__":
    main()
