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
"""CPU time of a program and all processes below it."""

import psutil

from .footprint import name_of

Reading = dict[tuple[int, float], tuple[str, float]]
"""Name and CPU seconds so far of every process, by id and creation time."""


def cpu_seconds(root: psutil.Process) -> Reading:
    """Read every process of the tree."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = name_of(process), times.user + times.system
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return found


def difference(before: Reading, after: Reading) -> dict[str, float]:
    """CPU seconds between two readings, by process name, the largest first."""
    spent: dict[str, float] = {}
    for key, (name, seconds) in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get(key, (name, 0.0))[1]
    return dict(sorted(spent.items(), key=lambda item: -item[1]))
