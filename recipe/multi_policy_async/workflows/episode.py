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
"""One workflow, from its id to its terminal record: issue, create, run, finalize; new attempts where the
infrastructure failed.
"""

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from ..clock import now
from ..gateway.client import AgentEndpoints
from ..ingest.handle import call
from ..ingest.ledger import TERMINAL
from ..rewards import Rewards
from ..trajectory import WorkflowId, WorkflowRecord
from .agents import Agents
from .base import Outcome, Task, Workflow, as_outcome
from .failures import InfrastructureError, describe, is_infrastructure, is_refusal, status_code
from .spec import WorkflowSpec
from .threads import WorkflowThreads
from .transcript import Transcripts

logger = logging.getLogger(__name__)

_CONTROL_TRIES = 3  # of one control call; finalize and create are idempotent by workflow id
_CANCEL_GRACE_S = 5.0  # for a workflow that passed its deadline to let go


class GatewayControl(Protocol):
    """What the driver and its episodes need of ``gateway.client.GatewayControlClient``."""

    async def create_workflow(self, workflow_id: str, *, purpose: str) -> Mapping[str, AgentEndpoints]: ...

    async def finalize(
        self,
        workflow_id: str,
        *,
        status: str,
        rewards: Rewards | None,
        score: float | None,
        error: str | None,
    ) -> Mapping[str, Any]: ...

    async def abort(self, workflow_id: str, *, error: str | None = None) -> Any: ...

    async def blocked(self, longer_than_s: float) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Ended:
    """How a workflow ended: a status of ``trajectory.WORKFLOW_STATUSES``, or ``before`` (an earlier process saw it)."""

    status: str
    score: float | None = None
    error: str | None = None
    attempts: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """A task played for its score."""

    score: float | None  # of the team; None: it failed
    rewards: Mapping[str, float] = field(default_factory=dict)  # of the agents that were called; 0 if it failed
    versions: Mapping[str, Sequence[str]] = field(default_factory=dict)  # model id -> oldest, newest that answered
    error: str | None = None


class EpisodeRunner:
    """Runs workflows one at a time per call; many calls may run together.

    Args:
        workflow: the user's workflow, shared by all episodes.
        spec: deadlines and attempts.
        gateway: control client.
        ingestor: the trajectory ingestor or its actor handle.
        http: connection pool of the agents' clients.
        transcripts: the episodes to write down.
        threads: workflows whose ``run`` is a plain function at once.
    """

    def __init__(
        self,
        workflow: Workflow,
        spec: WorkflowSpec,
        gateway: GatewayControl,
        ingestor: Any,
        http: httpx.AsyncClient,
        transcripts: Transcripts,
        *,
        threads: int,
    ):
        self._workflow = workflow
        self._spec = spec
        self._gateway = gateway
        self._ingestor = ingestor
        self._http = http
        self._transcripts = transcripts
        self._most_threads = threads
        self._threads = WorkflowThreads(threads)
        self._deadline_s = spec.timeout_s + _CANCEL_GRACE_S

    async def run(self, first: WorkflowId, members: int, task: Task) -> Ended:
        """Bring one member of a task to its terminal record.

        Args:
            first: id of the first attempt.
            members: workflows of the task.
            task: the task.

        Raises:
            Exception: the ingestor failed; nothing can be recorded any more.
        """
        started = now()
        error: InfrastructureError | None = None
        workflow_id = first
        try:
            for retry in range(self._spec.max_attempts):
                workflow_id = first._replace(attempt=first.attempt + retry)
                if await call(self._ingestor, "issue", str(workflow_id), members, self._deadline_s) == TERMINAL:
                    return Ended("before", attempts=retry + 1)
                if retry:  # only now: an abort must not become the terminal record of the attempt before
                    await self._give_up(workflow_id._replace(attempt=workflow_id.attempt - 1))
                    await asyncio.sleep(self._spec.retry_wait_s * 2 ** (retry - 1))
                try:
                    return await self._attempt(workflow_id, task, retry, started)
                except InfrastructureError as failure:
                    error = failure
                    logger.warning("workflow %s: %s", workflow_id, failure)
        except asyncio.CancelledError:
            await self.abort(workflow_id, "the driver was stopped")
            raise
        return await self.abort(workflow_id, str(error), attempts=self._spec.max_attempts, started=started)

    async def evaluate(self, workflow_id: str, task: Task) -> Evaluated:
        """Play a task for its score only: its calls never enter the ledger, and it is not tried again.

        Args:
            workflow_id: unlike any training workflow's.
            task: the task.

        Raises:
            Exception: the gateway refuses the workflow itself.
        """
        try:
            endpoints = await self._control("create_workflow", workflow_id, purpose="eval")
            try:
                outcome, error = await self._play(workflow_id, endpoints, task)
            except InfrastructureError as failure:
                outcome, error = None, str(failure)
            status = "failed" if outcome is None else "ok"
            answer, status, error = await self._finalize(workflow_id, status, outcome, error)
        except InfrastructureError as failure:
            await self._give_up(workflow_id)
            return Evaluated(None, error=str(failure))
        except asyncio.CancelledError:
            await self._give_up(workflow_id)
            raise
        score = None
        if outcome is not None and status == "ok":
            score = answer.get("score") if outcome.score is None else outcome.score
            error = "no reward was returned or posted" if score is None else error
        failed = score is None
        return Evaluated(
            score=score,
            rewards=_agent_rewards(answer["trajectories"], failed),
            versions=answer["version_vector"],
            error=error,
        )

    def stop(self) -> None:
        """Start no more threads."""
        self._threads.stop()

    async def abort(
        self, workflow_id: WorkflowId, error: str, *, attempts: int = 1, started: float | None = None
    ) -> Ended:
        """Write the terminal record of a workflow that will not be finalized, and release its session."""
        record = WorkflowRecord(workflow_id=str(workflow_id), status="aborted", error=error, ended_at=time.time())
        try:
            await call(self._ingestor, "ingest", record)
        except ValueError as refusal:
            # The gateway finalized it in the meantime: then that is its one terminal record (invariant 4).
            logger.info("workflow %s is not aborted: %s", workflow_id, refusal)
            return Ended("before", attempts=attempts)
        await self._give_up(workflow_id)
        seconds = 0.0 if started is None else now() - started
        return Ended("aborted", error=error, attempts=attempts, seconds=seconds)

    async def _attempt(self, workflow_id: WorkflowId, task: Task, retry: int, started: float) -> Ended:
        endpoints = await self._control("create_workflow", workflow_id, purpose="train")
        token = urlsplit(next(iter(endpoints.values())).openai_base_url).path.split("/")[2]
        watched = self._transcripts.watch(token)
        try:
            outcome, error = await self._play(workflow_id, endpoints, task)
            status = "failed" if outcome is None else "ok"
            answer, status, error = await self._finalize(workflow_id, status, outcome, error)
        except BaseException:
            self._transcripts.forget(token)
            raise
        score = None
        if outcome is not None and status == "ok":
            score = answer.get("score") if outcome.score is None else outcome.score
        ended = Ended(answer.get("status", status), score, error, retry + 1, now() - started)
        if watched:
            episode = {
                "workflow_id": str(workflow_id),
                "status": ended.status,
                "score": score,
                "rewards": None if outcome is None else outcome.rewards,
                "info": {} if outcome is None else outcome.info,
                "error": error,
                "seconds": round(ended.seconds, 3),
                "trajectories": answer.get("trajectories"),
            }
            self._transcripts.write(token, task, episode)
        return ended

    async def _play(
        self, workflow_id: WorkflowId | str, endpoints: Mapping[str, AgentEndpoints], task: Task
    ) -> tuple[Outcome | None, str | None]:
        """The user's code up to its deadline: an outcome, or what went wrong in it."""
        agents = Agents(endpoints, self._http, self._spec.timeout_s)
        if inspect.iscoroutinefunction(self._workflow.run):
            playing = asyncio.ensure_future(self._workflow.run(task, agents))
        elif await self._threads.reserve(self._spec.timeout_s):
            playing = asyncio.ensure_future(_finish(self._threads.start(self._workflow.run, task, agents)))
        else:
            return None, (
                f"found no free thread within {self._spec.timeout_s:g} s: all {self._most_threads} are held by "
                "workflows that passed their deadline and still run"
            )
        try:
            done, _ = await asyncio.wait({playing}, timeout=self._spec.timeout_s)
            if not done:
                late = f"passed its deadline of {self._spec.timeout_s:g} s"
                if (policy := await self._blocked_on(workflow_id)) is not None:
                    raise InfrastructureError(f"{late} at the closed gate of {policy}")
                return None, late
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing}, timeout=_CANCEL_GRACE_S)
        failure = asyncio.CancelledError("cancelled itself") if playing.cancelled() else playing.exception()
        if failure is not None:
            if is_infrastructure(failure, _origin(endpoints)):
                raise InfrastructureError(describe(failure)) from failure
            logger.info("workflow %s failed", workflow_id, exc_info=failure)
            return None, describe(failure)
        try:
            return as_outcome(playing.result()), None
        except Exception as error:
            # Reading the user's objects runs their code, which may raise anything; it is the workflow's own fault.
            logger.warning("workflow %s: its result cannot be used", workflow_id, exc_info=True)
            return None, f"result of workflow {workflow_id}: {describe(error)}"

    async def _finalize(
        self, workflow_id: WorkflowId | str, status: str, outcome: Outcome | None, error: str | None
    ) -> tuple[Mapping[str, Any], str, str | None]:
        rewards, score = (None, None) if outcome is None else (outcome.rewards, outcome.score)
        try:
            answer = await self._control(
                "finalize", workflow_id, status=status, rewards=rewards, score=score, error=error
            )
            return answer, status, error
        except Exception as refusal:
            if status == "failed" or status_code(refusal) != 400:
                raise
            # Rewards that the gateway refuses are a fault of the workflow.
            error = describe(refusal)
            logger.warning("workflow %s: its result was refused: %s", workflow_id, error)
        answer = await self._control("finalize", workflow_id, status="failed", rewards=None, score=None, error=error)
        return answer, "failed", error

    async def _control(self, method: str, workflow_id: WorkflowId | str, **settings: Any) -> Any:
        """A control call, repeated while the gateway is not there.

        Raises:
            InfrastructureError: it stays away, or it does not know the workflow any more.
            Exception: it refuses (4xx).
        """
        for repeat in range(_CONTROL_TRIES):
            try:
                return await getattr(self._gateway, method)(str(workflow_id), **settings)
            except Exception as error:
                if is_refusal(error) and status_code(error) != 404:
                    raise
                failure = error
                logger.info("%s of %s did not succeed: %s", method, workflow_id, describe(error))
            if status_code(failure) == 404:
                break
            if repeat + 1 < _CONTROL_TRIES:
                await asyncio.sleep(min(1.0, self._spec.retry_wait_s) * 2**repeat)
        raise InfrastructureError(f"gateway, {method}: {describe(failure)}") from failure

    async def _blocked_on(self, workflow_id: WorkflowId | str) -> str | None:
        """The policy that a workflow waits for, which syncs or is not there; ``None``: it waits for none."""
        try:
            async with asyncio.timeout(_CANCEL_GRACE_S):
                blocked = await self._gateway.blocked(self._spec.blocked_after_s)
            return blocked.get(str(workflow_id))
        except Exception as error:  # a gateway that cannot be asked, in whatever way: the deadline decides alone
            logger.info("whether %s is blocked is not known: %s", workflow_id, describe(error))
            return None

    async def _give_up(self, workflow_id: WorkflowId | str) -> None:
        """Release the session of an attempt that has ended for us; the gateway may be gone, so its answer is moot."""
        try:
            async with asyncio.timeout(_CANCEL_GRACE_S):
                await self._gateway.abort(str(workflow_id))
        except Exception as error:
            logger.info("abort of %s at the gateway: %s", workflow_id, describe(error))


async def _finish(running: asyncio.Future[Any]) -> Any:
    """A plain function may return an awaitable, which belongs to this loop."""
    result = await running
    return await result if inspect.isawaitable(result) else result


def _agent_rewards(trajectories: Iterable[Mapping[str, Any]], failed: bool) -> dict[str, float]:
    """Mean reward of each agent's rows, as the gateway resolved them; a failed workflow is worth 0 to all it called."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in trajectories:
        if failed or row["reward"] is not None:
            rewards[row["agent_id"]].append(0.0 if failed else row["reward"])
    return {agent: sum(own) / len(own) for agent, own in rewards.items()}


def _origin(endpoints: Mapping[str, AgentEndpoints]) -> str:
    """Scheme and address of the gateway, as in the URLs it minted."""
    parts = urlsplit(next(iter(endpoints.values())).openai_base_url)
    return f"{parts.scheme}://{parts.netloc}/"
