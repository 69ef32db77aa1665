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
"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Everything that waits by the loop (``asyncio.sleep``, timeouts, ``call_later``) runs unchanged, in the order it would
have in real time, as fast as the machine computes; computing itself takes a nanosecond per turn of the loop. Two runs
of one program with the same seeds are the same.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_TURN_S = 1e-9  # of one turn of the loop: a wait that rounding has left just short of its deadline must come to an end


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: this program would wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks: where the loop would wait for its next timer, it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise Deadlock("every task waits for another one")
        self.now += _TURN_S if ready else max(timeout or 0.0, _TURN_S)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at second 0. Work for executors is done at once, in the loop's thread, and takes no simulated time.

    So the ledger's SQL runs as it is, in the order it was asked for; only its thread is gone.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # goes to whoever awaits it, as from an executor: theirs to log and count
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time.

    Raises:
        Deadlock: nothing could ever happen again.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
