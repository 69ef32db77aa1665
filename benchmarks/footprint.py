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
"""What a job costs before and while it trains: seconds to the first trained step, processes, memory.

    python benchmarks/footprint.py single_policy_tiny planner_solver_tiny

Runs each composition for a few weight versions, and reads the process tree once every policy has trained a step.
Memory is PSS: pages that processes share are counted once.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

STEP_LINE = re.compile(r"\] (\S+)\s+version\s+(\d+)")


@dataclass(frozen=True)
class Footprint:
    config: str
    seconds_to_first_steps: float
    processes: int
    pss_gb: float
    largest: list[tuple[str, int]]  # name, MB


def measure(config: str, policies: int, overrides: list[str]) -> Footprint:
    """Run one composition and read its process tree after the first step of its last policy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy", "--config-name", config]
        settings = [f"run.dir={folder}/run", "stop.updates=3", "validation.before_training=false"]
        started = time.monotonic()
        job = subprocess.Popen([*command, *settings, *overrides], stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        trained: set[str] = set()
        footprint = None
        for line in job.stdout:
            if match := STEP_LINE.search(line):
                trained.add(match[1])
            if len(trained) == policies and footprint is None:
                footprint = read_tree(config, job.pid, time.monotonic() - started)
        if job.wait() != 0 or footprint is None:
            raise SystemExit(f"{config} ended with exit code {job.returncode}")
        return footprint


def read_tree(config: str, pid: int, seconds: float) -> Footprint:
    root = psutil.Process(pid)
    sizes: Counter[str] = Counter()
    processes = [root, *root.children(recursive=True)]
    for process in processes:
        try:
            sizes[name_of(process)] += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    largest = [(name, size // 2**20) for name, size in sizes.most_common()]
    return Footprint(config, seconds, len(processes), sum(sizes.values()) / 2**30, largest)


def name_of(process: psutil.Process) -> str:
    command = process.cmdline() or ["?"]
    if command[0].startswith("ray::"):
        return re.split(r"[.(\s]", command[0])[0]
    script = next((word for word in command[1:] if not word.startswith("-")), command[0])
    return os.path.basename(script if "python" in command[0] else command[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--details", action="store_true", help="memory by process name")
    arguments = parser.parse_args()

    from recipe.multi_policy_async.configuration.compose import compose_job

    print(f"{'composition':<24} {'policies':>8} {'to first steps':>15} {'processes':>10} {'memory (PSS)':>13}")
    for config in arguments.configs:
        policies = len(compose_job(config, arguments.override, None).trained)
        result = measure(config, policies, arguments.override)
        print(
            f"{config:<24} {policies:>8} {result.seconds_to_first_steps:>13.1f} s {result.processes:>10} "
            f"{result.pss_gb:>10.2f} GB",
            flush=True,
        )
        if arguments.details:
            print("\n".join(f"    {name:<40} {size:>6} MB" for name, size in result.largest))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    main()
