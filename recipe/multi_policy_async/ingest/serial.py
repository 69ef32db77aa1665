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
"""How the ingestor stays responsive: disk work on one thread, changes one at a time, waiters told of each change."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Serial:
    """One thread for blocking work and one lock around changes that span disk and memory."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._lock = asyncio.Lock()

    async def on_disk(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call on the thread; calls run in the order they were made."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def exclusively(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` alone, and to its end even if the caller is cancelled.

        A commit whose change in memory is lost would break the accounting (invariant 3).
        """

        async def locked() -> T:
            async with self._lock:
                return await work

        return await asyncio.shield(asyncio.ensure_future(locked()))

    def stop(self) -> None:
        """Let the thread finish what it has and end."""
        self._thread.shutdown(wait=True)


class Broadcast:
    """Tells every waiter that something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def now(self) -> asyncio.Event:
        """Take this before looking at the state, wait on it after: then no change is missed."""
        return self._event

    @staticmethod
    async def wait(event: asyncio.Event, timeout_s: float) -> None:
        """Until ``event`` is set or ``timeout_s`` have passed."""
        if timeout_s <= 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
