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
"""Work that grows with what a client sends is done beside the loop when that is much: the loop serves everybody."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

LONG_TEXT = 32_768  # characters; encoding more takes milliseconds
LONG_BODY = 131_072  # bytes; in the worst case, tiny messages, checking and rendering 8 MiB takes seconds


async def off_loop(long: bool, function: Callable[..., _T], *args: Any) -> _T:
    """What ``function`` returns, called in a thread when its input is ``long``."""
    return await asyncio.to_thread(function, *args) if long else function(*args)
