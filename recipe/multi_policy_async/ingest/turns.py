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
"""Rows by the turns that their agent took in their workflow, in few classes: do long conversations get lost?

A long conversation ends late with old tokens, so it is dropped as stale more often, and what is trained is short. Where
trained rows stand beside stale ones by turns, that is seen.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping

from ..trajectory import Trajectory
from .reasons import STALE, TRAINED

_FIRST = (1, 2, 3, 5, 9, 17)
"""Fewest turns of each class; the last is open."""

COMPARED = (TRAINED, STALE)
"""What became of rows whose turn to be trained had come."""

TURNS_CLASS = (
    f"CASE {' '.join(f'WHEN turns >= {first} THEN {first}' for first in reversed(_FIRST[1:]))} ELSE {_FIRST[0]} END"
)
"""SQL for ``turns_class`` of the column ``turns``."""


def turns_by_agent(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """Turns that left a sampled token, of each agent of one workflow. A merged row has several."""
    turns: Counter[str] = Counter()
    for row in trajectories:
        turns[row.agent_id] += max(1, len(row.metadata.get("calls", ())))
    return turns


def turns_class(turns: int) -> int:
    """The class of a number of turns, by the fewest turns in it."""
    return _FIRST[max(0, bisect_right(_FIRST, turns) - 1)]


def label(first: int) -> str:
    """A class in words: ``1``, ``3-4``, ``17+``."""
    index = _FIRST.index(first)
    if index + 1 == len(_FIRST):
        return f"{first}+"
    last = _FIRST[index + 1] - 1
    return str(first) if last == first else f"{first}-{last}"


def stale_share(counts: Mapping[str, int]) -> float:
    """The part of the rows of one class that was lost as stale, of those that are in ``COMPARED``."""
    settled = sum(counts.get(fate, 0) for fate in COMPARED)
    return counts.get(STALE, 0) / settled if settled else 0.0
