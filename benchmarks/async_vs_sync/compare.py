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
"""Asynchronous against synchronous co-training: real jobs, the same models, tasks, settings and resources, alternating.

    python -m benchmarks.async_vs_sync.compare --configs planner_solver_tiny slow_tool_tiny --rounds 3 --updates 16

Asynchronous is ``ingest.schedule: all``, synchronous is ``sync``: play tasks, train everybody, repeat. The order
changes from round to round. Prints what every stage did, in the words of the simulator, and the speed-up by round; the
same question on simulated resources: ``python -m recipe.multi_policy_async.simulate --compare``.

Runs that ``--out`` holds already are read, not repeated: more rounds may be added later.
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

from recipe.multi_policy_async.simulator.report import MODES

from ..process_tree import cpu_seconds, difference
from .measured import CPU_FILE, JobRun, measure
from .report import as_dict, run_lines, summary

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).resolve().parent / "config"
SCHEDULE = dict(zip(MODES, ("all", "sync"), strict=True))
READ_EVERY_S = 0.5
LONGEST_RUN_S = 900.0
DONE = "done"


def command(config: str, mode: str, run_dir: Path, updates: int, overrides: Sequence[str]) -> list[str]:
    """The job; what it would do besides (evaluations, deleting old rows of the ledger) is off."""
    folder = ["--config-dir", str(CONFIG)] if (CONFIG / f"{config}.yaml").exists() else []
    settings = [f"run.dir={run_dir}", f"stop.updates={updates}", f"ingest.schedule={SCHEDULE[mode]}"]
    settings += ["validation.before_training=false", "validation.at_end=false", "ingest.prune_every_s=1e9"]
    settings += [f"metrics.pipeline_interval_s={READ_EVERY_S}", "metrics.backends=[file]"]
    module = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy"]
    return [*module, *folder, "--config-name", config, *settings, *overrides]


def run(run_dir: Path, job: Sequence[str]) -> None:
    """Run a job to its end and write down meanwhile what CPU time it and the machine spend.

    Raises:
        SystemExit: it failed.
    """
    log = run_dir.with_suffix(".log")
    started = time.monotonic()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out, run_dir.with_suffix(f".{CPU_FILE}").open("w") as readings:
        process = subprocess.Popen(job, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            readings.write(json.dumps(read_cpu(root)) + "\n")
            if time.monotonic() - started > LONGEST_RUN_S:
                process.terminate()
                process.wait(60)
                raise SystemExit(f"no end after {LONGEST_RUN_S:.0f} s; {log}")
            time.sleep(READ_EVERY_S)
    if process.returncode != 0:
        raise SystemExit(f"exit code {process.returncode}; {log}")
    run_dir.with_suffix(f".{CPU_FILE}").rename(run_dir / CPU_FILE)
    (run_dir / DONE).touch()


def read_cpu(root: psutil.Process) -> dict[str, object]:
    """CPU seconds so far of the tree's processes, by name, and of the machine."""
    machine = psutil.cpu_times()
    return {
        "time": time.time(),
        "cores": psutil.cpu_count(),
        "machine": sum(machine) - machine.idle - getattr(machine, "iowait", 0.0),
        "by_process": difference({}, cpu_seconds(root)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["planner_solver_tiny", "slow_tool_tiny"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=16, help="versions of every policy")
    parser.add_argument("--skip", type=int, default=2, help="first versions that are left out")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / time.strftime("async_vs_sync-%Y%m%d-%H%M%S"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of all runs")
    arguments = parser.parse_intermixed_args()
    if not 0 < arguments.skip < arguments.updates - 1:
        parser.error("--skip must leave two versions at least")
    out = arguments.out.resolve()
    runs: dict[str, dict[str, list[JobRun]]] = {config: {mode: [] for mode in MODES} for config in arguments.configs}
    for round_ in range(1, arguments.rounds + 1):
        for config in arguments.configs:
            for mode in MODES if round_ % 2 else reversed(MODES):
                run_dir = out / config / f"{round_}-{mode}"
                if not (run_dir / DONE).exists():
                    run(run_dir, command(config, mode, run_dir, arguments.updates, arguments.overrides))
                measured = measure(run_dir, arguments.skip)
                runs[config][mode].append(measured)
                load = os.getloadavg()[0]
                print(f"== {config}, round {round_}, {mode} (load {load:.1f})\n{run_lines(measured)}\n", flush=True)
    for config, by_mode in runs.items():
        print(f"==== {config}\n{summary(by_mode)}\n")
    result = {
        "updates": arguments.updates,
        "skip": arguments.skip,
        "overrides": arguments.overrides,
        "runs": {
            config: {mode: [as_dict(each) for each in found] for mode, found in by_mode.items()}
            for config, by_mode in runs.items()
        },
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(out / "result.json")


if __name__ == "__main__":
    main()
