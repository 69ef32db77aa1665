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
"""Python client of the control API, used by whoever runs workflows."""

from dataclasses import dataclass
from typing import Any

import httpx
from httpx_aiohttp import HttpxAiohttpClient

from ..rewards import Rewards, plain


@dataclass(frozen=True)
class AgentEndpoints:
    """Where one agent of one workflow finds its model."""

    agent_id: str
    model_id: str
    openai_base_url: str
    anthropic_base_url: str


class ControlError(Exception):
    """The gateway refused a control call.

    Attributes:
        status: HTTP status; 400 is the caller's fault, 429 and 503 may be tried again.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class GatewayControlClient:
    """Creates, finalizes and aborts workflows.

    Args:
        base_url: what ``MultiModelGatewayRouter.start`` returned.
        key: the control key.
        timeout_s: of one call; finalize waits for running calls and for the ingestor.
    """

    def __init__(self, base_url: str, key: str, *, timeout_s: float = 120.0) -> None:
        self._workflows_url = base_url.rstrip("/") + "/control/v1/workflows"
        self._http = HttpxAiohttpClient(
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            trust_env=False,  # the gateway is never behind a proxy
            verify=base_url.startswith("https"),  # building a TLS context costs 30 ms
            limits=httpx.Limits(max_connections=0),  # aiohttp's word for no limit
        )

    async def create_workflow(self, workflow_id: str, *, purpose: str = "train") -> dict[str, AgentEndpoints]:
        """Begin a workflow; again with the same id gives the same URLs.

        Returns:
            The endpoints by agent id.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        answer = await self._call("POST", "", {"workflow_id": workflow_id, "purpose": purpose})
        return {agent_id: AgentEndpoints(agent_id=agent_id, **urls) for agent_id, urls in answer["agents"].items()}

    async def finalize(
        self,
        workflow_id: str,
        *,
        status: str = "ok",
        rewards: Rewards | None = None,
        score: float | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        """End a workflow with its rewards, in any form of ``rewards.py``; repeated, it gives the first answer.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        body = {
            "status": status,
            "rewards": plain(rewards),
            "score": score,
            "error": error,
        }
        return await self._call("POST", f"/{workflow_id}/finalize", body)

    async def abort(self, workflow_id: str, *, error: str | None = None) -> dict[str, Any]:
        """End a workflow without rows.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", f"/{workflow_id}/abort", {"error": error})

    async def pause(self, workflow_id: str) -> dict[str, Any]:
        """Hold the workflow's new requests.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", f"/{workflow_id}/pause", {})

    async def resume(self, workflow_id: str) -> dict[str, Any]:
        """Let them go.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", f"/{workflow_id}/resume", {})

    async def report_rewards(self, workflow_id: str, rewards: Rewards) -> dict[str, Any]:
        """Report rewards before the end; finalize uses them where it brings none.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", f"/{workflow_id}/rewards", {"rewards": plain(rewards)})

    async def status(self, workflow_id: str) -> dict[str, Any]:
        """State and calls of a workflow.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("GET", f"/{workflow_id}", None)

    async def blocked(self, longer_than_s: float) -> dict[str, str]:
        """Workflows with a request that has waited at a closed gate for longer: the model that each waits for.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return (await self._call("GET", f"?waiting_longer_than_s={longer_than_s}", None))["workflows"]

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        response = await self._http.request(method, self._workflows_url + path, json=body)
        if response.status_code != 200:
            try:
                message = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = response.text[:500]
            raise ControlError(response.status_code, message)
        return response.json()
