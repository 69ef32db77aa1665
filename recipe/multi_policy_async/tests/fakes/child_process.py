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
"""Child processes that are given a JSON configuration, say where they listen, and end with their parent."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

try:
    import uvloop
except ImportError:
    uvloop = None


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` with uvloop where it is installed, as Ray does for its actors."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


async def until_parent_leaves() -> None:
    """Return when standard input ends, which it does with the parent."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


class Child:
    """``python -m module CONFIG``; its first line of output is a JSON object, the hello.

    Several can start side by side: only ``hello`` waits.
    """

    def __init__(self, module: str, config: dict[str, Any]) -> None:
        self._module = module
        self._hello: dict[str, Any] | None = None
        command = [sys.executable, "-m", module, json.dumps(config)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def hello(self) -> dict[str, Any]:
        if self._hello is None:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self._module} ended with code {self._process.wait()} before it listened")
            self._hello = json.loads(line)
        return self._hello

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Let it end in its own order."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
