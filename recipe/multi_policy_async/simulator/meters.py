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
"""What was busy for how long, within the part of a simulation that is measured."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Window:
    """Seconds of the simulated clock that are measured, ``begin`` included."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def overlap(self, start: float, stop: float) -> float:
        """Seconds of ``[start, stop]`` that lie in the window."""
        return max(0.0, min(stop, self.end) - max(start, self.begin))

    def __contains__(self, moment: float) -> bool:
        return self.begin <= moment < self.end


class Level:
    """A number that changes by steps, such as requests that are running, and its mean over the window.

    Args:
        window: what is measured.
        clock: simulated seconds.
    """

    def __init__(self, window: Window, clock: Callable[[], float]):
        self._window = window
        self._clock = clock
        self._value = 0.0
        self._since = clock()
        self._integral = 0.0

    def add(self, difference: float) -> None:
        moment = self._clock()
        self._integral += self._value * self._window.overlap(self._since, moment)
        self._value += difference
        self._since = moment

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more, for the duration of the block."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    @property
    def integral(self) -> float:
        """Value times seconds so far."""
        self.add(0)
        return self._integral

    @property
    def mean(self) -> float:
        return self.integral / self._window.seconds


class Phases:
    """Which of several phases something was in, and the share of the window that each took.

    Args:
        window: what is measured.
        clock: simulated seconds.
        first: the phase it begins in.
    """

    def __init__(self, window: Window, clock: Callable[[], float], first: str):
        self._window = window
        self._clock = clock
        self.now = first
        self._since = clock()
        self._seconds: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        moment = self._clock()
        self._seconds[self.now] += self._window.overlap(self._since, moment)
        self.now, self._since = phase, moment

    def share(self, phase: str) -> float:
        """Share of the window that ``phase`` took."""
        self.enter(self.now)
        return self._seconds[phase] / self._window.seconds


@dataclass
class Samples:
    """Mean and largest of the numbers that were seen in the window."""

    count: int = 0
    total: float = 0.0
    largest: float = field(default=0.0)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0
