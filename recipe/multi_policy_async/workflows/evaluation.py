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
"""One score for the whole team: every task of a held-out dataset played once, beside training."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..rewards import mean_reward
from ..trajectory import Version
from .episode import Evaluated


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation says.

    A workflow that failed counts with score 0 and is told apart in ``failed``. ``first`` and ``last`` are the oldest
    and newest version of each policy that answered a call: several, since policies go on training meanwhile.
    """

    tasks: int
    failed: int
    score: float  # mean over all tasks
    rewards: Mapping[str, float] = field(default_factory=dict)  # by agent, mean over turns and tasks
    first: Mapping[str, Version] = field(default_factory=dict)
    last: Mapping[str, Version] = field(default_factory=dict)
    last_error: str | None = None


def summarize(results: Sequence[Evaluated]) -> EvaluationReport:
    """Mean score and rewards of ``results``.

    Raises:
        ValueError: there are none.
    """
    if not results:
        raise ValueError("an evaluation needs at least one task")
    rewards: dict[str, list[float]] = defaultdict(list)
    versions: dict[str, list[Version]] = defaultdict(list)
    for result in results:
        if result.outcome is not None and isinstance(result.outcome.rewards, Mapping):
            for agent, reward in result.outcome.rewards.items():
                if (mean := mean_reward(reward)) is not None:
                    rewards[agent].append(mean)
        for model_id, span in result.versions.items():
            versions[model_id] += [Version.parse(text) for text in span]
    scores = [result.outcome.score or 0.0 for result in results if result.outcome is not None]
    errors = [result.error for result in results if result.error is not None]
    return EvaluationReport(
        tasks=len(results),
        failed=len(results) - len(scores),
        score=sum(scores) / len(results),
        rewards={agent: sum(values) / len(values) for agent, values in rewards.items()},
        first={model_id: min(seen) for model_id, seen in versions.items()},
        last={model_id: max(seen) for model_id, seen in versions.items()},
        last_error=errors[-1] if errors else None,
    )
