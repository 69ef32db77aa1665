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
"""Threads of workflows whose ``run`` is a plain function."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class WorkflowThreads:
    """As many threads as workflows may run at once, apart from asyncio's own few.

    A function that passes its deadline cannot be ended: it keeps its thread until it returns. So a thread is reserved
    first, and a deadline begins when a function starts.

    Args:
        size: number of threads, made when they are needed.
    """

    def __init__(self, size: int):
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="workflow")
        self._free = asyncio.Semaphore(size)

    async def reserve(self, timeout_s: float) -> bool:
        """Wait for a free thread; ``False`` after ``timeout_s``. A reserved thread must be used by ``start``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError:
            return False
        return True

    def start(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call ``function`` in the reserved thread, with the caller's context variables."""
        loop = asyncio.get_running_loop()
        running = self._pool.submit(contextvars.copy_context().run, function, *args)
        running.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(self._free.release))
        return asyncio.wrap_future(running)

    def stop(self) -> None:
        """Take no more functions; those that run go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
