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
"""A model's state as others see it: pushed by its runtime, never asked for.

A trainer blocks its own loop in a step or a weight sync, so a status that had to be fetched from it would come late.
"""

import logging
from collections.abc import Sequence
from typing import Any

import ray

from ..gateway_binding_registry import ModelState, ModelStatus
from ..trajectory import Version

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 10.0


class RuntimeStatusClient:
    """Pushes one model's status to the gateways.

    Args:
        model_id: the model.
        gateways: handles of the gateway actors.
    """

    def __init__(self, model_id: str, gateways: Sequence[Any]):
        self.model_id = model_id
        self._gateways = list(gateways)

    def drain(self) -> None:
        """Let calls finish that a weight sync would cut for good; every gateway bounds its own wait."""
        ray.get([gateway.drain.remote(self.model_id) for gateway in self._gateways])

    def push(self, state: ModelState, version: Version) -> None:
        """Tell every gateway, and wait (bounded) until each has taken it, so that a closed gate is closed."""
        status = ModelStatus(state=state, version=version)
        refs = [gateway.set_status.remote(self.model_id, status) for gateway in self._gateways]
        done, late = ray.wait(refs, num_returns=len(refs), timeout=PUSH_TIMEOUT_S) if refs else ([], [])
        if late:
            logger.warning("%s: %d gateways did not take status %s in time", self.model_id, len(late), state.value)
        for ref in done:
            ray.get(ref)
