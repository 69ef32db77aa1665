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
"""A running job for end-to-end tests: the tiny co-training, its console, its processes and its ports."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(os.environ.get("ASSETS_DIR", ROOT / ".cache" / "assets"))
LINE_TIMEOUT_S = 300


class Job:
    """The tiny planner-solver job as a child process.

    Args:
        run_dir: its run directory.
        overrides: Hydra overrides.
        config: the composition.
    """

    def __init__(self, run_dir: Path, *overrides: str, config: str = "planner_solver_tiny"):
        self.run_dir = run_dir
        self.lines: list[str] = []
        command = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy", "--config-name", config]
        self._process = subprocess.Popen(
            [*command, f"run.dir={run_dir}", *overrides],
            cwd=ROOT,
            env={**os.environ, "ASSETS_DIR": str(ASSETS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._tree: dict[int, float] = {}
        self._ports: set[int] = set()

    def wait_for_line(self, pattern: str) -> str:
        """Read the console until a line matches; remember the processes and ports that exist then."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + LINE_TIMEOUT_S
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                self._remember()
                return self.lines[-1]
            if time.monotonic() > deadline:
                break
        raise AssertionError(f"no line matched {pattern!r}:\n" + "\n".join(self.lines[-30:]))

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the process that was started, as an out-of-memory kill would, and nothing else."""
        self._process.kill()
        self._process.wait()

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def wait(self, timeout_s: float) -> int:
        """Read the console to its end and return the exit code."""
        output, _ = self._process.communicate(timeout=timeout_s)
        self.lines += output.splitlines()
        return self._process.returncode

    def left_behind(self, grace_s: float = 30.0) -> list[str]:
        """What of the remembered processes and ports is still there after ``grace_s`` seconds."""
        deadline = time.monotonic() + grace_s
        while (found := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def end(self) -> None:
        """Kill what a failed test left."""
        for pid, created in self._tree.items():
            if self._is(pid, created):
                psutil.Process(pid).kill()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _remember(self) -> None:
        for process in self.processes():
            try:
                self._tree[process.pid] = process.create_time()
                self._ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            except psutil.NoSuchProcess:
                continue  # a short-lived child
        assert len(self._tree) > 5 and self._ports, "the job's processes and ports were seen"

    def _alive(self) -> list[str]:
        processes = [
            f"process {pid} {psutil.Process(pid).cmdline()[:2]}"
            for pid, created in self._tree.items()
            if self._is(pid, created)
        ]
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        return processes + [f"port {port}" for port in sorted(self._ports & listening)]

    @staticmethod
    def _is(pid: int, created: float) -> bool:
        try:
            process = psutil.Process(pid)
            return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@pytest.fixture(scope="session")
def assets() -> Path:
    """The tiny models and their tasks, as the example's script prepares them; made once."""
    from recipe.multi_policy_async.assets.prepare_models import TINY

    settings = [f"--setting={name}={str(value).lower()}" for name, value in TINY.tasks.items()]
    prepare = [sys.executable, "-m", "recipe.multi_policy_async.assets"]
    for module, *arguments in (
        ("prepare_models", "--kind", "tiny", "--out", str(ASSETS / "tiny")),
        ("prepare_tasks", "--dataset", "chain_sum", *settings, "--out", str(ASSETS / "tiny_tasks")),
    ):
        subprocess.run([*prepare[:-1], f"{prepare[-1]}.{module}", *arguments], cwd=ROOT, check=True)
    return ASSETS


@pytest.fixture
def start_job(tmp_path, assets):
    """Starts jobs and leaves none behind, whatever the test does."""
    jobs: list[Job] = []

    def start(*overrides: str, config: str = "planner_solver_tiny", run_dir: Path | None = None) -> Job:
        jobs.append(Job(run_dir or tmp_path / f"run{len(jobs)}", *overrides, config=config))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
