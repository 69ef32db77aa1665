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
"""The version that a model's rollout servers serve, as its synchronizer set it."""

import threading

from ..trajectory import Version


class VersionTracker:
    """Current served version of one model. Written by its synchronizer, read from other threads."""

    def __init__(self, model_id: str, incarnation: int = 0):
        self.model_id = model_id
        self._version = Version(incarnation, 0)
        self._lock = threading.Lock()

    def set(self, version: Version) -> None:
        """Record a newly served version.

        Raises:
            ValueError: the version is older than the current one.
        """
        with self._lock:
            if version < self._version:
                raise ValueError(f"{self.model_id}: version {version} would go back behind {self._version}")
            self._version = version

    def get(self) -> Version:
        with self._lock:
            return self._version
