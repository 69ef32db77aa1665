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
"""CPU time and memory of the processes of a run."""

import psutil


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
