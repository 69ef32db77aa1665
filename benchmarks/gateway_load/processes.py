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
"""Child processes of the load program: started with a JSON configuration, watched, ended with their parent."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import psutil

try:
    import uvloop
except ImportError:
    uvloop = None


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` with uvloop where it is installed, as Ray does for its actors."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


def loop_name() -> str:
    return type(asyncio.get_running_loop()).__module__.split(".")[0]


async def until_parent_leaves() -> None:
    """Return when standard input ends, which it does with the parent."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


class Child:
    """One child process that says where it listens in its first line."""

    def __init__(self, module: str, config: dict[str, Any]) -> None:
        command = [sys.executable, "-m", f"{__package__}.{module}", json.dumps(config)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} ended with code {self._process.wait()} before it listened")
        self.hello: dict[str, Any] = json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Meter:
    """CPU seconds and memory of processes."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._processes = {name: [psutil.Process(pid) for pid in group] for name, group in pids.items()}

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by name."""
        used = {}
        for name, group in self._processes.items():
            times = [process.cpu_times() for process in group]
            used[name] = sum(t.user + t.system for t in times)
        return used

    def rss_mb(self, name: str) -> float:
        return sum(process.memory_info().rss for process in self._processes[name]) / 2**20
