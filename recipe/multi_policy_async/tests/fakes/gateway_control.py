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
"""A gateway without HTTP: it mints sessions, and finalize hands a record with one row per called agent to a sink."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from recipe.multi_policy_async.gateway.client import AgentEndpoints
from recipe.multi_policy_async.rewards import mean_reward
from recipe.multi_policy_async.tests.fakes.workflow_records import PLANNER, record, trajectory
from recipe.multi_policy_async.trajectory import WorkflowRecord

URL = "http://127.0.0.1:9"


def http_error(status: int, url: str = URL) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", f"{url}/control/v1/workflows")
    return httpx.HTTPStatusError(f"status {status}", request=request, response=httpx.Response(status, request=request))


def connection_error(url: str = URL) -> httpx.ConnectError:
    return httpx.ConnectError("connection refused", request=httpx.Request("POST", f"{url}/v1/chat/completions"))


class FakeGatewayControl:
    """Sessions in memory.

    Args:
        sink: takes records, as the ingestor's ``ingest``.
        models: agent id -> model id; each agent leaves one row per workflow.
        version: version number that sampled the rows.
    """

    def __init__(
        self,
        sink: Callable[[WorkflowRecord], Awaitable[dict[str, int]]],
        models: Mapping[str, str],
        version: Callable[[], int] = lambda: 0,
    ):
        self._sink = sink
        self._models = models
        self._version = version
        self.purposes: dict[str, str] = {}
        self.created: list[str] = []
        self.finalized: list[tuple[str, str]] = []
        self.aborted: list[str] = []
        self.errors: dict[str, list[BaseException]] = {}  # method -> errors of its next calls
        self.silent_after: dict[str, int] = {}  # agent -> workflows after which it is not called any more
        self.posted: Any = None  # rewards that the agents of every workflow post
        self.waiting: dict[str, str] = {}  # policy that a workflow waits for, by workflow
        self.lose_answers: list[str] = []  # methods whose next call works, but its answer is lost

    def _maybe_fail(self, method: str) -> None:
        if self.errors.get(method):
            raise self.errors[method].pop(0)

    async def create_workflow(self, workflow_id: str, *, purpose: str) -> Mapping[str, AgentEndpoints]:
        await asyncio.sleep(0)
        self._maybe_fail("create_workflow")
        self.purposes[workflow_id] = purpose
        self.created.append(workflow_id)
        url = f"{URL}/w/{workflow_id}/agents"
        return {
            agent: AgentEndpoints(agent, model, f"{url}/{agent}/v1", f"{url}/{agent}")
            for agent, model in self._models.items()
        }

    async def finalize(
        self, workflow_id: str, *, status: str, rewards: Any, score: float | None, error: str | None
    ) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        self._maybe_fail("finalize")
        rewards = self.posted if rewards is None and status == "ok" else rewards
        score = mean_reward(rewards) if score is None and rewards is not None else score
        if self.purposes[workflow_id] == "eval":
            rows = [{"agent_id": row.agent_id, "reward": row.reward} for row in self._rows(workflow_id, rewards)]
            versions = {PLANNER: ["0.2", "1.3"]}
            return {
                "workflow_id": workflow_id,
                "status": status,
                "score": score,
                "trajectories": rows,
                "version_vector": versions,
            }
        rows = [] if rewards is None and status == "ok" else self._rows(workflow_id, rewards)
        accepted = await self._sink(record(workflow_id, *rows, status=status, score=score, error=error))
        self.finalized.append((workflow_id, status))
        if "finalize" in self.lose_answers:
            self.lose_answers.remove("finalize")
            raise connection_error()
        answer = {"workflow_id": workflow_id, "status": status, "score": score}
        return {**answer, "trajectories": [], "accepted": accepted}

    def _rows(self, workflow_id: str, rewards: Any) -> Sequence[Any]:
        def reward(agent: str) -> float | None:
            return rewards.get(agent) if isinstance(rewards, Mapping) else rewards

        return [
            trajectory(workflow_id, model=model, agent_id=agent, reward=reward(agent), version=self._version())
            for agent, model in self._models.items()
            if len(self.finalized) < self.silent_after.get(agent, math.inf)
        ]

    async def abort(self, workflow_id: str, *, error: str | None = None) -> None:
        await asyncio.sleep(0)
        self._maybe_fail("abort")
        self.aborted.append(workflow_id)
        await self._sink(record(workflow_id, status="aborted", error="aborted by the client"))

    async def blocked(self, longer_than_s: float) -> dict[str, str]:
        await asyncio.sleep(0)
        return dict(self.waiting)
