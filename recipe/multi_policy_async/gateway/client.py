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
"""Python client of the control API, used by whoever runs workflows.

With several gateway processes it gives each workflow to one of them, by the workflow's id alone: every process of a job
that knows the gateways' URLs finds the owner again, also one that was started anew.
"""

import asyncio
import zlib
from collections.abc import Sequence
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
        base_urls: what ``MultiModelGatewayRouter.start`` returned, of every gateway process, everywhere in one order.
        key: the control key of all of them.
        timeout_s: of one call; finalize waits for running calls and for the ingestor.
        transport: how the gateway is reached; ``None``: HTTP.
    """

    def __init__(
        self,
        base_urls: str | Sequence[str],
        key: str,
        *,
        timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base_urls = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        self._http = HttpxAiohttpClient(
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            trust_env=False,  # the gateway is never behind a proxy
            verify=any(url.startswith("https") for url in self._base_urls),  # building a TLS context costs 30 ms
            limits=httpx.Limits(max_connections=0),  # aiohttp's word for no limit
            transport=transport,
        )

    async def create_workflow(self, workflow_id: str, *, purpose: str = "train") -> dict[str, AgentEndpoints]:
        """Begin a workflow; again with the same id gives the same URLs.

        Returns:
            The endpoints by agent id.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        answer = await self._call("POST", workflow_id, None, {"workflow_id": workflow_id, "purpose": purpose})
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
        return await self._call("POST", workflow_id, "/finalize", body)

    async def abort(self, workflow_id: str, *, error: str | None = None) -> dict[str, Any]:
        """End a workflow without rows.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", workflow_id, "/abort", {"error": error})

    async def pause(self, workflow_id: str) -> dict[str, Any]:
        """Hold the workflow's new requests.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", workflow_id, "/pause", {})

    async def resume(self, workflow_id: str) -> dict[str, Any]:
        """Let them go.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", workflow_id, "/resume", {})

    async def report_rewards(self, workflow_id: str, rewards: Rewards) -> dict[str, Any]:
        """Report rewards before the end; finalize uses them where it brings none.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("POST", workflow_id, "/rewards", {"rewards": plain(rewards)})

    async def status(self, workflow_id: str) -> dict[str, Any]:
        """State and calls of a workflow.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        return await self._call("GET", workflow_id, "", None)

    async def blocked(self, longer_than_s: float) -> dict[str, str]:
        """Workflows with a request that has waited at a closed gate for longer: the model that each waits for.

        Raises:
            ControlError, httpx.HTTPError: refused, or not reached.
        """
        query = f"?waiting_longer_than_s={longer_than_s}"
        answers = await asyncio.gather(*(self._request("GET", url, query, None) for url in self._base_urls))
        return {workflow: model for answer in answers for workflow, model in answer["workflows"].items()}

    async def close(self) -> None:
        await self._http.aclose()

    def owner(self, workflow_id: str) -> str:
        """Base URL of the gateway process that has the workflow."""
        return self._base_urls[zlib.crc32(workflow_id.encode()) % len(self._base_urls)]

    async def _call(
        self, method: str, workflow_id: str, action: str | None, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        """``action``: None for the collection, else what follows the workflow's own path."""
        path = "" if action is None else f"/{workflow_id}{action}"
        return await self._request(method, self.owner(workflow_id), path, body)

    async def _request(self, method: str, base_url: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        url = f"{base_url.rstrip('/')}/control/v1/workflows{path}"
        response = await self._http.request(method, url, json=body)
        if response.status_code != 200:
            try:
                message = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = response.text[:500]
            raise ControlError(response.status_code, message)
        return response.json()
