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
"""WorkflowDriver: tasks in, finalized workflows out, never further ahead of training than admission allows.

    dataset --> order --> admission (room in training, max_concurrent) --> n episodes per task --> end_of_data
                              ^                                            |
                              '----- ingestor: groups in flight, queued, in training

| waits for | where | ended by |
|---|---|---|
| room in training | before a task | ingestor, drain, stop |
| a free slot | before a task, before an episode | an episode that ends or is blocked on a policy, drain, stop |
| agents | in an episode | the workflow, its deadline, stop |
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import HttpxAiohttpClient

from .clock import now
from .ingest.handle import TargetDiedError, call
from .trajectory import WorkflowId
from .workflows.base import Task, Workflow
from .workflows.dataset import TaskSource
from .workflows.episode import Ended, EpisodeRunner, GatewayControl
from .workflows.evaluation import EvaluationReport, Evaluator
from .workflows.failures import describe
from .workflows.slots import Slots, watch_blocked, without_attempt
from .workflows.spec import ValidationSpec, WorkflowSpec
from .workflows.task_plan import plan_tasks
from .workflows.transcript import Transcripts

logger = logging.getLogger(__name__)

_SCORE_WINDOW = 256  # episodes in the running means
_ADMIT_POLL_S = 1.0  # how late draining may be noticed
_MAX_OUTAGE_WAIT_S = 30.0  # before another task while workflows are aborted
_STOP_S = 15.0  # for cancelled episodes to write their terminal records


class DriverError(RuntimeError):
    """The driver gave up; the message names the cause."""


class WorkflowDriver:
    """Plain class with async methods: an actor, or an object in a test.

    Args:
        spec: which workflow, how many, deadlines.
        workflow: the user's workflow.
        tasks: the dataset.
        gateway: control client.
        ingestor: the trajectory ingestor or its actor handle.
        eval_tasks: what ``evaluate`` plays.
        validation: how it plays them.
        run_dir: where episodes are written; ``None``: nowhere.
        shuffle: shuffle tasks within each epoch.
        seed: of the shuffling.
        epochs: ``None``: until stopped.
        max_tasks: tasks of the whole run; ``None``: no limit.
        policies: of the job; each has slots for workflows that are blocked on it.
        poll_s: longest wait of one call to the ingestor.
        transport: how the agents reach the gateway; ``None``: HTTP.
    """

    def __init__(
        self,
        spec: WorkflowSpec,
        workflow: Workflow,
        tasks: TaskSource,
        gateway: GatewayControl,
        ingestor: Any,
        *,
        eval_tasks: TaskSource | None = None,
        validation: ValidationSpec | None = None,
        run_dir: Path | None = None,
        shuffle: bool,
        seed: int,
        epochs: int | None = None,
        max_tasks: int | None = None,
        policies: int = 1,
        poll_s: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self._spec = spec
        self._tasks = tasks
        self._ingestor = ingestor
        self._plan = {"shuffle": shuffle, "seed": seed, "epochs": epochs, "max_tasks": max_tasks}
        self._poll_s = poll_s
        self._transcripts = Transcripts(run_dir and run_dir / "episodes.jsonl", spec.dump_every)
        self._http = HttpxAiohttpClient(
            limits=httpx.Limits(max_connections=0),  # aiohttp's word for no limit
            event_hooks={"response": [self._transcripts.on_response]},
            trust_env=False,  # no proxies: the gateway is on this host or in this cluster
            transport=transport,
        )
        parts = (workflow, spec, gateway, ingestor, self._http, self._transcripts)
        threads = spec.max_concurrent + policies * spec.max_blocked_per_policy
        self._runner = EpisodeRunner(*parts, threads=threads)
        self._evaluator: Evaluator | None = None
        if eval_tasks is not None and validation is not None:
            runner = EpisodeRunner(*parts, threads=validation.max_concurrent)
            self._evaluator = Evaluator(runner, eval_tasks, validation)
        self._gateway = gateway
        self._slots = Slots(spec.max_concurrent, spec.max_blocked_per_policy)
        self._episodes: set[asyncio.Task] = set()
        self._wake = asyncio.Event()  # an episode ended or holds another slot, or draining began
        self._draining = False
        self._failure: BaseException | None = None
        self._state = "starting"
        self._endings: Counter[str] = Counter()
        self._retried = 0
        self._tasks_started = 0
        self._epoch = 0
        self._last_error: str | None = None
        self._failures_in_a_row = 0
        self._outages_in_a_row = 0
        self._outage_since = 0.0  # first abort of a row of them, moved on by idle time
        self._scores: deque[float] = deque(maxlen=_SCORE_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_SCORE_WINDOW)

    async def run(self) -> None:
        """Start tasks until they are used up, ``drain`` or ``stop``; then tell the trainers that no more will come.

        Raises:
            DriverError: too many workflows failed in a row, a policy gets no groups, or a part it needs is gone. The
                ingestor was told.
        """
        watching = asyncio.ensure_future(
            watch_blocked(self._slots, self._gateway.blocked, self._spec.blocked_after_s, self._wake.set)
        )
        try:
            try:
                await self._produce()
                await self._wait_until(lambda: not self._episodes, "finishing")
            finally:
                watching.cancel()
                await self._cancel_episodes()
            await call(self._ingestor, "end_of_data")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._state = "dead"
            cause = str(error) if isinstance(error, DriverError) else f"workflow driver: {describe(error)}"
            await self._report_death(cause)
            raise DriverError(cause) from error
        self._state = "ended"

    async def evaluate(self) -> EvaluationReport:
        """Play the evaluation tasks, beside training or before it, in slots of their own; see ``Evaluator.evaluate``.

        Raises:
            ValueError: the driver has no evaluation tasks.
        """
        if self._evaluator is None:
            raise ValueError("there is nothing to evaluate on: data.val_files names no file")
        return await self._evaluator.evaluate()

    async def drain(self) -> None:
        """Start no more tasks; the running ones go on, up to their deadlines."""
        self._draining = True
        self._wake.set()

    async def stop(self) -> None:
        """Abort what runs and end; rows of aborted workflows count as ``shutdown``."""
        await self.drain()
        try:
            await call(self._ingestor, "end_of_data")
        except TargetDiedError as error:
            logger.info("stopping without an ingestor: %s", error)
        await self._cancel_episodes()
        if self._evaluator is not None:
            await self._evaluator.stop()
        self._runner.stop()
        await self._http.aclose()

    async def stats(self) -> dict[str, Any]:
        """Numbers for the pipeline line. ``score_mean`` is over the last 256 workflows that ended well."""
        return {
            "state": self._state,
            "running": self._slots.running,
            "blocked": self._slots.blocked,
            "waiting": len(self._episodes) - self._slots.running,
            "finished": self._endings["ok"] + self._endings["no_calls"],
            "failed": self._endings["failed"],
            "aborted": self._endings["aborted"],
            "retried": self._retried,
            "tasks_started": self._tasks_started,
            "epoch": self._epoch,
            "score_mean": _mean(self._scores),
            "seconds_mean": _mean(self._seconds),
            "last_error": self._last_error,
            "episodes_not_written": self._transcripts.lost,
        }

    async def _produce(self) -> None:
        for ids, members in (await call(self._ingestor, "unfinished")).values():
            logger.info("task %s is taken up again: %s", WorkflowId.parse(ids[0]).task_key, ", ".join(ids))
            self._start([WorkflowId.parse(text) for text in ids], members)
        started = await call(self._ingestor, "issued_tasks")
        for epoch, task in plan_tasks(len(self._tasks), started=started, **self._plan):
            await self._wait_until(
                lambda: self._draining or len(self._episodes) - self._slots.blocked < self._spec.max_concurrent,
                "all slots in use",
            )
            if not await self._admit(epoch, task):
                return
            self._epoch = epoch
            self._tasks_started += 1
            ids = [WorkflowId(epoch, task, sample) for sample in range(self._spec.n)]
            self._start(ids, self._spec.n)

    async def _admit(self, epoch: int, task: int) -> bool:
        """Wait for room in training; ``False`` once draining."""
        if self._outages_in_a_row:  # else an outage would use up the dataset
            wait_s = self._spec.retry_wait_s * 2 ** min(self._outages_in_a_row, 10)
            await self._wait_until(lambda: self._draining, "waiting after an outage", min(wait_s, _MAX_OUTAGE_WAIT_S))
        while not self._draining:
            self._check()
            if (reason := await call(self._ingestor, "starving")) is not None:
                raise DriverError(f"workflow driver: {reason}")
            asked, idle = now(), not self._episodes
            if await call(self._ingestor, "admit", epoch, task, self._spec.n, min(self._poll_s, _ADMIT_POLL_S)):
                self._state = "producing"
                return True
            if idle:  # nothing could have ended well
                self._outage_since += now() - asked
            self._state = "waiting for training"
        return False

    def _start(self, ids: Sequence[WorkflowId], members: int) -> None:
        if ids[0].task >= len(self._tasks):
            raise DriverError(f"task {ids[0].task} of the ledger is not in the dataset of {len(self._tasks)} rows")
        task = self._tasks[ids[0].task]
        for workflow_id in ids:
            episode = asyncio.ensure_future(self._episode(workflow_id, members, task))
            self._episodes.add(episode)
            episode.add_done_callback(self._on_episode_end)

    async def _episode(self, workflow_id: WorkflowId, members: int, task: Task) -> None:
        async with self._slots.hold(without_attempt(str(workflow_id))):
            ended = await self._runner.run(workflow_id, members, task)
        self._count(ended)

    def _count(self, ended: Ended) -> None:
        self._endings[ended.status] += 1
        self._retried += ended.attempts - 1
        if ended.status in ("ok", "no_calls"):
            self._failures_in_a_row = self._outages_in_a_row = 0
            self._seconds.append(ended.seconds)
            if ended.score is not None:
                self._scores.append(ended.score)
        elif ended.status == "failed":
            self._last_error = ended.error
            self._failures_in_a_row += 1
            most = self._spec.max_failures_in_a_row
            if most is not None and self._failures_in_a_row >= most:
                raise DriverError(f"workflow driver: {most} workflows in a row failed; last: {ended.error}")
        elif ended.status == "aborted":
            self._last_error = ended.error
            self._outages_in_a_row += 1
            if self._outages_in_a_row == 1:  # not since a workflow ended well: training may have left no room meanwhile
                self._outage_since = now()
            outage = now() - self._outage_since
            if outage > self._spec.max_outage_s:
                raise DriverError(f"workflow driver: no workflow ended well for {outage:.0f} s; last: {ended.error}")

    def _on_episode_end(self, episode: asyncio.Task) -> None:
        self._episodes.discard(episode)
        if not episode.cancelled() and episode.exception() is not None:
            self._failure = self._failure or episode.exception()
        self._wake.set()

    async def _wait_until(self, condition: Callable[[], bool], state: str, timeout_s: float | None = None) -> None:
        """Wait while episodes end, up to ``timeout_s``; a silently dead one becomes a crash of the driver."""
        deadline = None if timeout_s is None else now() + timeout_s
        while True:
            self._wake.clear()
            self._check()
            if condition():
                return
            self._state = state
            try:
                async with asyncio.timeout(None if deadline is None else deadline - now()):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _cancel_episodes(self) -> None:
        running = list(self._episodes)
        for episode in running:
            episode.cancel()
        if running:
            await asyncio.wait(running, timeout=_STOP_S)

    async def _report_death(self, cause: str) -> None:
        logger.error("%s", cause)
        try:
            await call(self._ingestor, "producer_died", cause)
        except Exception as error:
            # The job's supervisor sees this driver's own error; the trainers see their own calls fail.
            logger.error("could not tell the ingestor: %s", describe(error))


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None
