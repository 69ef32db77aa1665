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
"""The agents of one workflow: OpenAI clients bound to the URLs that the gateway minted for it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from ..gateway.client import AgentEndpoints


class Agent:
    """One agent of one workflow.

    Frameworks take ``base_url`` (OpenAI) or ``anthropic_base_url`` with any API key; ``client`` and ``chat`` are there
    for workflows that call the model themselves.

    Args:
        endpoints: the URLs that the gateway minted for it.
        http: shared connection pool.
        timeout_s: longest call.
    """

    def __init__(self, endpoints: AgentEndpoints, http: httpx.AsyncClient, timeout_s: float):
        self.agent_id = endpoints.agent_id
        self.base_url = endpoints.openai_base_url
        self.anthropic_base_url = endpoints.anthropic_base_url
        self.model = endpoints.model_id
        self._http = http
        self._timeout_s = timeout_s
        self._client: Any = None

    @property
    def client(self) -> Any:
        """An ``openai.AsyncOpenAI`` bound to this agent."""
        if self._client is None:
            import openai  # here: it takes most of a second

            self._client = openai.AsyncOpenAI(
                base_url=self.base_url, api_key="workflow", http_client=self._http, timeout=self._timeout_s
            )
        return self._client

    async def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Text of one chat completion; ``settings`` as ``chat.completions.create`` takes them.

        Raises:
            openai.OpenAIError: the call failed.
        """
        completion = await self.client.chat.completions.create(model=self.model, messages=list(messages), **settings)
        return completion.choices[0].message.content or ""


class Agents(Mapping[str, Agent]):
    """Agents by id; an unknown one is an error that names the known ones."""

    def __init__(self, endpoints: Mapping[str, AgentEndpoints], http: httpx.AsyncClient, timeout_s: float):
        self._agents = {agent_id: Agent(urls, http, timeout_s) for agent_id, urls in endpoints.items()}

    def __getitem__(self, agent_id: str) -> Agent:
        if agent_id not in self._agents:
            raise UnknownAgentError(agent_id, sorted(self._agents))
        return self._agents[agent_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


class UnknownAgentError(ValueError, KeyError):
    """A workflow asked for an agent that ``agent_model_mapping`` does not name."""

    def __init__(self, agent_id: str, known: Sequence[str]):
        super().__init__(f"unknown agent {agent_id!r}; agent_model_mapping names {', '.join(known) or 'none'}")

    def __str__(self) -> str:
        return self.args[0]
