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
"""A ledger whose commits wait until they are let go: a disk as slow as a test likes, without a clock."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...trajectory_ingestor import TrajectoryIngestor


class SlowDisk:
    """Holds the ledger's thread before each COMMIT, as SQLite's own call does on a slow disk. Fast until ``slow``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None  # commits that are let go; None: all
        self.waiting = False
        self.commits = 0

    def slow(self) -> None:
        """Let nothing go."""
        with self._changed:
            self._left = 0

    async def let_one_go(self) -> None:
        """Until a commit was let go: the one that waits, or the next one."""
        with self._changed:
            assert self._left is not None
            self._left, before = self._left + 1, self.commits
            self._changed.notify()
        while self.commits == before:
            await asyncio.sleep(0.001)

    def fast(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify()

    def before(self, statement: str) -> None:
        """SQLite's trace hook, called in the ledger's thread before a statement is run."""
        if statement != "COMMIT":
            return
        with self._changed:
            self.waiting = True
            self._changed.wait_for(lambda: self._left != 0)
            self.waiting = False
            self.commits += 1
            if self._left is not None:
                self._left -= 1


@contextmanager
def slow_disk(ingestor: TrajectoryIngestor) -> Iterator[SlowDisk]:
    """A disk below ``ingestor``; fast again at the end, so that its thread ends."""
    disk = SlowDisk()
    ingestor._state.ledger._db._db.set_trace_callback(disk.before)
    try:
        yield disk
    finally:
        disk.fast()
