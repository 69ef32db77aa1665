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
"""verl's SGLang replica, whose HTTP answers carry the version of the weights that sampled them.

Upstream gap: verl keeps the version in its Ray actor (``async_sglang_server.py:set_global_steps``) and never tells
SGLang, so ``meta_info.weight_version`` of an HTTP answer is SGLang's default.
"""

from typing import Any

UPDATE_TIMEOUT_S = 30.0


def versioned_server_class() -> type:
    """A subclass of verl's ``SGLangHttpServer``; built on demand, since SGLang is only installed on GPU machines."""
    import httpx
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    class VersionedSGLangHttpServer(SGLangHttpServer):
        async def set_global_steps(self, global_steps: int) -> None:
            """Called after the load and before the resume: the only place where the version cannot race.

            ``abort_all_requests`` is SGLang's default there and would abort running turns.
            """
            await super().set_global_steps(global_steps)
            if self.node_rank != 0:
                return
            version = f"{(self.config.custom or {}).get('incarnation', 0)}.{global_steps}"
            async with httpx.AsyncClient(timeout=UPDATE_TIMEOUT_S) as client:
                response = await client.post(
                    f"http://{self._server_address}:{self._server_port}/update_weight_version",
                    json={"new_version": version, "abort_all_requests": False},
                )
                response.raise_for_status()

    return VersionedSGLangHttpServer


def versioned_replica_class() -> type:
    """A subclass of verl's ``SGLangReplica`` that launches versioned servers."""
    import ray
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    class VersionedSGLangReplica(RolloutReplicaRegistry.get("sglang")):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(versioned_server_class())

    return VersionedSGLangReplica
