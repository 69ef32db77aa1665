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
"""The control API: who runs workflows creates, finalizes and aborts them here. Guarded by a bearer key."""

import hmac
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict
from starlette.types import Scope

from .errors import Unauthorized
from .http_io import header, json_response
from .openapi import ERRORS
from .service import GatewayService
from .session_store import ClosedWorkflow


class CreateWorkflow(BaseModel):
    """A workflow to begin; creating one that is open gives the same answer again."""

    model_config = ConfigDict(extra="forbid")
    workflow_id: str
    purpose: Literal["train", "eval"] = "train"


OneReward = float | None  # null is refused with the workflow's id, like every value that is no finite number
RewardsBody = OneReward | list[OneReward] | dict[str, OneReward | list[OneReward] | dict[str, OneReward]]


class FinalizeWorkflow(BaseModel):
    """How a workflow ended.

    ``rewards``: one number for all, a list with one per trajectory, or by agent id, trajectory id or request id; an
    agent's may be a list by turn, or numbers by turn number.
    """

    model_config = ConfigDict(extra="forbid")
    status: Literal["ok", "failed"] = "ok"
    rewards: RewardsBody = None
    score: float | None = None
    error: str | None = None


class ReportRewards(BaseModel):
    """Rewards in the same forms; later reports win, name by name."""

    model_config = ConfigDict(extra="forbid")
    rewards: RewardsBody


class AbortWorkflow(BaseModel):
    """Why a workflow ends without rows."""

    model_config = ConfigDict(extra="forbid")
    error: str | None = None


def key_checker(control_key: str) -> Callable[[Scope], None]:
    """A check of the bearer key, or of ``x-api-key``, that takes the same time for every wrong key."""
    expected = control_key.encode()

    def check(scope: Scope) -> None:
        given = header(scope, b"authorization") or ""
        if given[:7].lower() == "bearer ":  # a scheme's case is free
            given = given[7:]
        given = given or header(scope, b"x-api-key") or ""
        if not hmac.compare_digest(given.encode(), expected):
            raise Unauthorized("the control API needs its bearer key")

    return check


def control_router(service: GatewayService) -> APIRouter:
    """Routes under /control/v1. The key is checked before the body is read, see ``ControlGuard``."""
    documented_key = Depends(HTTPBearer(auto_error=False))
    router = APIRouter(
        prefix="/control/v1/workflows", dependencies=[documented_key], tags=["control"], responses=ERRORS
    )

    @router.post("")
    async def create(body: CreateWorkflow, request: Request) -> dict[str, Any]:
        """Begin a workflow and mint the URLs of its agents."""
        session = service.sessions.create(body.workflow_id, body.purpose)
        base = f"{request.url.scheme}://{request.url.netloc}/w/{session.token}/agents"
        return {
            "workflow_id": session.workflow_id,
            "token": session.token,
            "agents": {
                agent_id: {
                    "openai_base_url": f"{base}/{agent_id}/v1",
                    "anthropic_base_url": f"{base}/{agent_id}",
                    "model_id": service.route(agent_id),
                }
                for agent_id in service.routes.agents
            },
        }

    @router.get("")
    async def blocked(waiting_longer_than_s: Annotated[float, Query(ge=0)]) -> dict[str, dict[str, str]]:
        """Workflows with a request that has waited at a closed gate for longer: the model that each waits for."""
        return {"workflows": service.blocked(waiting_longer_than_s)}

    @router.post("/{workflow_id}/finalize")
    async def finalize(workflow_id: str, body: FinalizeWorkflow) -> Response:
        """End a workflow, hand its rows to the ingestor; repeated, the first answer comes again."""
        answer = await service.closer.finalize(
            workflow_id, status=body.status, rewards=body.rewards, score=body.score, error=body.error
        )
        return json_response(answer)

    @router.post("/{workflow_id}/abort")
    async def abort(workflow_id: str, body: AbortWorkflow | None = None) -> Response:
        """End a workflow without rows; running generations are ended at the servers."""
        return json_response(await service.closer.abort(workflow_id, error=body.error if body else None))

    @router.post("/{workflow_id}/rewards")
    async def rewards(workflow_id: str, body: ReportRewards) -> dict[str, Any]:
        """Report rewards before the end; finalize uses them where it brings none."""
        session = service.sessions.by_id(workflow_id)
        session.report_rewards(body.rewards, service.routes.agents)
        return session.status()

    @router.post("/{workflow_id}/pause")
    async def pause(workflow_id: str) -> dict[str, Any]:
        """Hold the workflow's new requests; longer than ``hold_timeout_s`` they get 429."""
        session = service.sessions.by_id(workflow_id)
        session.pause()
        return session.status()

    @router.post("/{workflow_id}/resume")
    async def resume(workflow_id: str) -> dict[str, Any]:
        """Let them go."""
        session = service.sessions.by_id(workflow_id)
        session.resume()
        return session.status()

    @router.get("/{workflow_id}")
    async def status(workflow_id: str) -> dict[str, Any]:
        """State and calls of a workflow; of a closed one, its final answer."""
        found = service.sessions.find(workflow_id)
        if isinstance(found, ClosedWorkflow):
            return {**found.answer, "state": "closed"}
        return found.status()

    return router


def health_router(service: GatewayService) -> APIRouter:
    """Probes and metrics; open, they tell nothing of workflows."""
    router = APIRouter(tags=["health"])
    not_ready: dict[int | str, dict[str, Any]] = {"503": {"description": "Not ready"}}

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The gateway's loop turns."""
        return {"status": "ok"}

    @router.get("/readyz", responses=not_ready)
    async def readyz(response: Response) -> dict[str, Any]:
        """Ready when every model is; per model, who is not."""
        ready = {model_id: service.ready(model_id) for model_id in service.registry.model_ids}
        response.status_code = 200 if all(ready.values()) else 503
        return {"ready": all(ready.values()), "models": ready}

    @router.get("/readyz/{model_id}", responses={**not_ready, "404": {"description": "No model of this job"}})
    async def readyz_model(model_id: str, response: Response) -> dict[str, Any]:
        """Whether a request for this model would pass now."""
        if model_id not in service.registry.model_ids:
            response.status_code = 404
            return {"ready": False, "models": {}, "known": list(service.registry.model_ids)}
        ready = service.ready(model_id)
        response.status_code = 200 if ready else 503
        return {"ready": ready, "state": service.gates[model_id].state.value}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
