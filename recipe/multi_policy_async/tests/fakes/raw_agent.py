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
"""An agent that does to its HTTP connections what no SDK does on purpose."""

from typing import Any

import httpx
import pytest

BODY = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
RETRY = {"x-stainless-retry-count": "1"}


class RawAgent:
    """Plain HTTP to one agent's URL."""

    def __init__(self, endpoint: Any) -> None:
        self.url = endpoint.openai_base_url + "/chat/completions"
        self.http = httpx.AsyncClient(verify=False, timeout=20)

    async def post(self, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> httpx.Response:
        return await self.http.post(self.url, json=body or BODY, headers=headers or {})

    async def leave(self, after_s: float, body: dict[str, Any] | None = None) -> None:
        """Ask, and close the connection before the answer."""
        async with httpx.AsyncClient(verify=False) as http:
            with pytest.raises(httpx.TimeoutException):
                await http.post(self.url, json=body or BODY, timeout=after_s)

    async def __aenter__(self) -> "RawAgent":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.http.aclose()
