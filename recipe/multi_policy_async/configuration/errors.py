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
"""How the configuration tells a user what is wrong: every problem at once, each with its remedy."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_UNSET = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the configuration.

    Args:
        key: dotted key as the user writes it.
        what: what is wrong, starting in lower case.
        value: the offending value, left out when there is none.
        allowed: what would be accepted.
        fix: what to do about it.
    """

    key: str
    what: str
    value: Any = _UNSET
    allowed: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        value = "" if self.value is _UNSET else f" = {self.value!r}"
        text = f"{self.key}{value}: {self.what}"
        if self.allowed:
            text += f"\n      allowed: {self.allowed}"
        if self.fix:
            text += f"\n      fix: {self.fix}"
        return text


class ConfigError(ValueError):
    """The configuration cannot be run. Carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        assert self.problems, "a ConfigError needs a problem"
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"the configuration has {count} problem{'s' if count > 1 else ''}:"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean 'x'?`` for the known word closest to ``word``, or None when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None
