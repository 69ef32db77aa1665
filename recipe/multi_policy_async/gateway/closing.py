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
"""Ends a workflow: finalize and abort. Each workflow gets exactly one terminal record (invariant 4)."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..agent_model_route_table import AgentModelRouteTable
from ..gateway_binding_registry import GatewayBindingRegistry
from ..rewards import (
    Rewards,
    TeamShare,
    by_turn,
    check_rewards,
    is_finite,
    mean_reward,
    mix_team_score,
    resolve_rewards,
)
from ..trajectory import Trajectory, WorkflowRecord
from .call import Call
from .errors import BadRequest, UpstreamFailed
from .metrics import GatewayMetrics
from .rows import build_rows, version_vector
from .session import WorkflowSession
from .session_store import ClosedWorkflow, SessionStore

logger = logging.getLogger(__name__)

Sink = Callable[[WorkflowRecord], Awaitable[dict[str, int]]]


class WorkflowCloser:
    """Seals a session, builds its rows and hands its terminal record to the sink.

    The record goes out before the session is closed: when the sink fails, the caller gets a 503, the session stays
    sealed, and finalizing again hands over the same rows. The sink takes a record twice as once.
    """

    def __init__(
        self,
        store: SessionStore,
        routes: AgentModelRouteTable,
        registry: GatewayBindingRegistry,
        sink: Sink,
        metrics: GatewayMetrics,
        *,
        merged: bool,
        team_share: TeamShare,
    ) -> None:
        self._store = store
        self._routes = routes
        self._registry = registry
        self._sink = sink
        self._metrics = metrics
        self._merged = merged
        self._team_share = team_share

    async def finalize(
        self, workflow_id: str, *, status: str, rewards: Rewards | None, score: float | None, error: str | None
    ) -> dict[str, Any]:
        """End a workflow with its rewards; repeated, it gives the first answer.

        Agents whose rewards differ by turn get one row per turn, also where conversations are merged. Without a score
        the mean of the rewards is the team's. Every reward passes here, whoever gave it, and what was given stays as it
        is: so it is mixed with the team's score once, however often a caller tries.

        Raises:
            NotFound: unknown workflow.
            BadRequest: the rewards do not fit the trajectories, or are not finite; the session stays sealed, try again.
            UpstreamFailed: the sink failed; try again.
        """
        found = self._store.find(workflow_id)
        if isinstance(found, ClosedWorkflow):
            return found.answer
        async with found.closing:
            if isinstance(again := self._store.find(workflow_id), ClosedWorkflow):
                return again.answer
            await found.seal()
            rewards = found.rewards if rewards is None else rewards
            chosen = found.chosen_calls(rewards if isinstance(rewards, Mapping) else ())
            try:
                if score is not None and not is_finite(score):
                    raise ValueError(f"workflow {workflow_id}: score is {score}, not a finite number")
                if rewards is not None:
                    rewards = check_rewards(workflow_id, rewards, self._routes.agents)
                rows = build_rows(
                    workflow_id,
                    chosen,
                    merged=self._merged,
                    per_call_agents=by_turn(rewards),
                    binding=self._registry.binding,
                )
                rows = resolve_rewards(
                    workflow_id,
                    rewards,
                    rows,
                    agents=self._routes.agents,
                    trained_models=self._trained() if found.purpose == "train" else (),
                    required=status == "ok",
                )
                team_score = mean_reward(rewards) if score is None and rewards is not None else score
                rows = mix_team_score(rows, rewards, team_score, self._team_share)
            except ValueError as fault:
                raise BadRequest(str(fault), param="rewards") from fault
            if status == "ok" and not rows:
                status = "no_calls"
            if status == "ok":  # a failed workflow has the score that its caller gives it
                score = team_score
            return await self._close(found, status, chosen, rows, score, error)

    async def abort(self, workflow_id: str, *, error: str | None = None, forget: bool = False) -> dict[str, Any]:
        """End a workflow without rows.

        Args:
            forget: also when the sink does not take the record: nobody is there to try again.

        Raises:
            NotFound: unknown workflow.
            UpstreamFailed: the sink failed; try again.
        """
        found = self._store.find(workflow_id)
        if isinstance(found, ClosedWorkflow):
            return found.answer
        async with found.closing:
            if isinstance(again := self._store.find(workflow_id), ClosedWorkflow):
                return again.answer
            await found.abandon_all("failed_workflow")
            return await self._close(found, "aborted", [], (), None, error, forget=forget)

    async def _close(
        self,
        session: WorkflowSession,
        status: str,
        chosen: list[Call],
        rows: tuple[Trajectory, ...],
        score: float | None,
        error: str | None,
        *,
        forget: bool = False,
    ) -> dict[str, Any]:
        record = WorkflowRecord(
            workflow_id=session.workflow_id,
            status=status,
            trajectories=rows,
            score=score,
            error=error,
            started_at=session.started_at,
            ended_at=time.time(),
            version_vector=version_vector(session.calls),
        )
        accepted: dict[str, int] = {}
        if session.purpose == "train":  # evaluation never enters the ledger
            try:
                accepted = await self._sink(record)
            except Exception as failure:
                # Whatever the ingest process raised, across a process boundary: the caller has to try again.
                logger.exception("the record of workflow %s was not taken", session.workflow_id)
                self._metrics.error("record_not_taken")
                if not forget:
                    raise UpstreamFailed(
                        f"the record of workflow {session.workflow_id} was not taken: {failure}"
                    ) from None
        session.settle(chosen)
        answer = {
            "workflow_id": session.workflow_id,
            "status": status,
            "score": score,
            "trajectories": [_summary(row) for row in rows],
            "accepted": accepted,
            "calls": session.status()["calls"],
            "version_vector": {m: [str(v) for v in span] for m, span in record.version_vector.items()},
        }
        self._store.close(session, answer)
        self._metrics.workflow_closed(status)
        return answer

    def _trained(self) -> frozenset[str]:
        bindings = [self._registry.binding(model_id) for model_id in self._registry.model_ids]
        return frozenset(binding.model_id for binding in bindings if binding is not None and binding.trained)


def _summary(row: Trajectory) -> dict[str, Any]:
    """What the control API tells about a row; the ids themselves go to the sink only."""
    return {
        "trajectory_id": row.trajectory_id,
        "agent_id": row.agent_id,
        "model_id": row.model_id,
        "request_id": row.request_id,
        "turn": row.turn,
        "prompt_tokens": len(row.prompt_ids),
        "response_tokens": len(row.response_ids),
        "sampled_tokens": int(row.response_mask.sum()),
        "policy_version": [str(version) for version in row.version_span],
        "finish_reason": row.finish_reason,
        "reward": row.reward,
    }
