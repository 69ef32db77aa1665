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
"""One score for the whole team: every task of a held-out dataset played, beside training or before it."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..clock import now
from ..trajectory import Version
from .dataset import TaskSource
from .episode import EpisodeRunner, Evaluated
from .spec import ValidationSpec

_CANCEL_S = 15.0  # for workflows that did not end in time to release their sessions


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation says.

    A workflow that failed counts with score 0 and is told apart in ``failed``. ``first`` and ``last`` are the oldest
    and newest version of each policy that answered a call: they differ where policies went on training meanwhile.
    """

    workflows: int
    failed: int
    score: float  # mean over all workflows
    rewards: Mapping[str, float]  # by agent, mean over the workflows that called it
    first: Mapping[str, Version]
    last: Mapping[str, Version]
    seconds: float = 0.0
    last_error: str | None = None


class Evaluator:
    """Plays the held-out tasks, ``max_concurrent`` at once; nothing of it enters the ledger.

    Args:
        runner: plays one task.
        tasks: the held-out tasks.
        spec: how many at once, how often each, how long.
    """

    def __init__(self, runner: EpisodeRunner, tasks: TaskSource, spec: ValidationSpec):
        self._runner = runner
        self._tasks = tasks
        self._spec = spec
        self._playing: set[asyncio.Future[Evaluated]] = set()

    async def evaluate(self) -> EvaluationReport:
        """Play every task ``n`` times; what has not ended within ``timeout_s`` has failed.

        Raises:
            Exception: a task cannot be read, or the gateway refuses a workflow.
        """
        name, started = f"eval-{uuid.uuid4().hex[:12]}", now()
        slots = asyncio.Semaphore(self._spec.max_concurrent)

        async def play(task: int, repeat: int) -> Evaluated:
            async with slots:
                return await self._runner.evaluate(f"{name}-t{task}-r{repeat}", self._tasks[task])

        playing = [
            asyncio.ensure_future(play(task, repeat))
            for repeat in range(self._spec.n)
            for task in range(len(self._tasks))
        ]
        self._playing.update(playing)
        try:
            wait_s = self._spec.timeout_s
            ended, _ = await asyncio.wait(playing, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await self._cancel(playing)
        late = Evaluated(None, error=f"did not end within validation.timeout_s={wait_s:g}")
        results = [each.result() if each in ended else late for each in playing]
        return summarize(results, seconds=now() - started)

    async def stop(self) -> None:
        """Give up what is being played."""
        await self._cancel(list(self._playing))
        self._runner.stop()

    async def _cancel(self, playing: Sequence[asyncio.Future[Evaluated]]) -> None:
        self._playing.difference_update(playing)
        if late := [each for each in playing if each.cancel()]:
            await asyncio.wait(late, timeout=_CANCEL_S)


def summarize(results: Sequence[Evaluated], seconds: float = 0.0) -> EvaluationReport:
    """Mean score and rewards of ``results``.

    Raises:
        ValueError: there are none.
    """
    if not results:
        raise ValueError("an evaluation needs at least one task")
    rewards: dict[str, list[float]] = defaultdict(list)
    versions: dict[str, list[Version]] = defaultdict(list)
    for result in results:
        for agent, reward in result.rewards.items():
            rewards[agent].append(reward)
        for model_id, span in result.versions.items():
            versions[model_id] += [Version.parse(text) for text in span]
    scores = [result.score for result in results if result.score is not None]
    errors = [result.error for result in results if result.error is not None]
    return EvaluationReport(
        workflows=len(results),
        failed=len(results) - len(scores),
        score=sum(scores) / len(results),
        rewards={agent: sum(values) / len(values) for agent, values in sorted(rewards.items())},
        first={model_id: min(seen) for model_id, seen in sorted(versions.items())},
        last={model_id: max(seen) for model_id, seen in sorted(versions.items())},
        seconds=seconds,
        last_error=errors[-1] if errors else None,
    )
