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
"""Transcripts on which the tiny models are warm-started: well-formed, and wrong at a known rate.

The planner restates a reasoning-gym ``chain_sum`` question in words, the solver computes what the planner said, the
verifier computes it once more with the solver's answer at hand. Every role errs in a share ``error_rate`` of its
transcripts, and its errors are spread over several wrong messages, so that the right one stays the likeliest: that is
what reinforcement can sharpen. Torch-free.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

OPERATOR_WORDS = {"+": "plus", "-": "minus"}


@dataclass(frozen=True)
class Transcript:
    """One user message and the assistant's reply, behind a system message where there is one."""

    prompt: str
    reply: str
    system: str | None = None


@dataclass(frozen=True)
class ChainSum:
    """A sum of ``terms`` with the operators between them (one fewer)."""

    terms: tuple[int, ...]
    operators: tuple[str, ...]

    @classmethod
    def parse(cls, expression: str) -> "ChainSum":
        """From reasoning-gym's ``metadata['expression']``, for example ``3 + 5 - 2``."""
        words = expression.split()
        return cls(tuple(int(word) for word in words[::2]), tuple(words[1::2]))

    @property
    def value(self) -> int:
        signs = (1, *(1 if operator == "+" else -1 for operator in self.operators))
        return sum(sign * term for sign, term in zip(signs, self.terms, strict=True))

    @property
    def plan(self) -> str:
        """The planner's message for it: ``3 plus 5 minus 2``."""
        words = [str(self.terms[0])]
        for operator, term in zip(self.operators, self.terms[1:], strict=True):
            words += [OPERATOR_WORDS[operator], str(term)]
        return " ".join(words)

    def misread(self, rng: random.Random) -> "ChainSum":
        """One operator or the last digit of one operand read wrongly."""
        if rng.random() < 0.5:
            place = rng.randrange(len(self.operators))
            operators = list(self.operators)
            operators[place] = "-" if operators[place] == "+" else "+"
            return ChainSum(self.terms, tuple(operators))
        place = rng.randrange(len(self.terms))
        terms = list(self.terms)
        sign, size = (-1 if terms[place] < 0 else 1), abs(terms[place])
        terms[place] = sign * (size - size % 10 + (size + rng.randint(1, 9)) % 10)
        return ChainSum(tuple(terms), self.operators)


def miscount(value: int, rng: random.Random) -> int:
    """A wrong result near the right one."""
    return value + rng.choice((-3, -2, -1, 1, 2, 3))


def planner_transcript(question: str, chain: ChainSum, rng: random.Random, error_rate: float) -> Transcript:
    return Transcript(question, (chain.misread(rng) if rng.random() < error_rate else chain).plan)


def solver_transcript(question: str, chain: ChainSum, rng: random.Random, error_rate: float) -> Transcript:
    value = miscount(chain.value, rng) if rng.random() < error_rate else chain.value
    return Transcript(chain.plan, str(value))


def verifier_transcript(question: str, chain: ChainSum, rng: random.Random, error_rate: float) -> Transcript:
    claimed = miscount(chain.value, rng) if rng.random() < 0.5 else chain.value
    value = miscount(chain.value, rng) if rng.random() < error_rate else chain.value
    return Transcript(f"{chain.plan} = {claimed}", str(value))


Role = Callable[[str, ChainSum, random.Random, float], Transcript]
ROLES: dict[str, Role] = {
    "planner": planner_transcript,
    "solver": solver_transcript,
    "verifier": verifier_transcript,
}


def transcripts(
    role: str, settings: dict[str, int], seed: int, error_rate: float, roles: Mapping[str, Role] = ROLES
) -> Iterator[Transcript]:
    """Endless transcripts of one role on reasoning-gym questions.

    Args:
        role: a key of ``roles``.
        settings: of reasoning-gym's ``chain_sum`` (``min_terms``, ``max_digits``, ...).
        seed: the same seed gives the same transcripts.
        error_rate: share of wrong replies.
    """
    import reasoning_gym  # here, so that the workflow's torch-free imports stay short

    rng = random.Random(f"{seed}/{role}")
    while True:
        for entry in reasoning_gym.create_dataset("chain_sum", seed=rng.randrange(2**31), size=1024, **settings):
            chain = ChainSum.parse(entry["metadata"]["expression"])
            yield roles[role](entry["question"], chain, rng, error_rate)
