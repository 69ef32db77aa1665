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
"""All gateway processes of a job as one: started, bound, asked and stopped together.

A workflow belongs to one process from its creation to its end (``gateway.client.GatewayControlClient.owner``), so that
the processes share nothing. Every one serves every model and gets every model's status.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from .gateway_binding_registry import ModelBinding, ModelState, ModelStatus
from .supervision import ANSWER_S, named


class GatewayGroup:
    """Handles of the gateway actors.

    Args:
        handles: one per process, in the order that clients know them by.
        control_key: of all of them.
    """

    def __init__(self, handles: Sequence[Any], control_key: str) -> None:
        self.handles = list(handles)
        self.control_key = control_key
        many = len(self.handles) > 1
        self._names = [f"gateway {n + 1} of {len(self.handles)}" if many else "gateway" for n in range(len(handles))]

    async def start(self) -> list[str]:
        """Listen.

        Returns:
            The base URLs, in order.

        Raises:
            JobFailedError: naming the process that could not.
        """
        return await self._each("start")

    async def bind(self, binding: ModelBinding) -> None:
        """Serve a model at every process.

        Raises:
            JobFailedError: naming the process that cannot.
        """
        await self._each("bind", binding)

    async def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Tell every process what a model can do, where its runtime cannot.

        Raises:
            JobFailedError: naming the process that does not answer.
        """
        await self._each("set_status", model_id, status, timeout_s=ANSWER_S)

    async def wait_closed(self) -> None:
        """For ever.

        Raises:
            JobFailedError: naming the first process that died; the workflows it had are lost with it.
        """
        await self._each("wait_closed")

    async def stats(self) -> dict[str, Any]:
        """As of one gateway, added up; a model's state is that of the process where it is furthest from open.

        Raises:
            JobFailedError: a process does not answer.
        """
        return add_stats(await self._each("stats", timeout_s=ANSWER_S))

    async def stop(self) -> None:
        """Stop all of them; one that is gone already does not matter."""
        await asyncio.gather(*(handle.stop.remote() for handle in self.handles), return_exceptions=True)

    async def _each(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        calls = (
            named(getattr(handle, method).remote(*args), name, timeout_s)
            for handle, name in zip(self.handles, self._names, strict=True)
        )
        return list(await asyncio.gather(*calls))


def add_stats(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One gateway's ``stats`` from those of several."""
    models: dict[str, dict[str, Any]] = {}
    for model_id in parts[0]["models"]:
        each = [part["models"][model_id] for part in parts]
        closed = [one for one in each if one["state"] != ModelState.OPEN.value]
        total = {name: sum(one[name] for one in each) for name in ("running", "waiting", "waiting_for_slot")}
        limits = [one["limit"] for one in each]
        models[model_id] = {**(closed or each)[0], **total, "limit": None if None in limits else sum(limits)}
    return {"workflows_open": sum(part["workflows_open"] for part in parts), "models": models}
