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
"""Disk work of an ingestor without its thread: the same schedule every time."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from recipe.multi_policy_async.ingest.serial import Serial
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor

T = TypeVar("T")


class InlineSerial(Serial):
    """Runs blocking calls in the event loop, with a pause before and after each as the thread would give."""

    async def on_disk(self, function: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(0)
        result = function(*args)
        await asyncio.sleep(0)
        return result


def without_a_thread(ingestor: TrajectoryIngestor) -> TrajectoryIngestor:
    """Where a cancelled call stops then depends on the event loop alone, not on how fast a thread was."""
    ingestor._state.serial.stop()
    ingestor._state.serial = InlineSerial()
    return ingestor
