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
"""A weight sync closes its model's gate, opens it with the new version, and never opens it over wrong weights."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineManager  # noqa: E402

from ...gateway_binding_registry import ModelState  # noqa: E402
from ...runtime.parameter_synchronizer import ParameterSynchronizer, WeightChecksumError  # noqa: E402
from ...runtime.version_tracker import VersionTracker  # noqa: E402
from ...trajectory import Version  # noqa: E402

pytestmark = pytest.mark.slow


class FakeStatus:
    def __init__(self):
        self.pushed: list[tuple[ModelState, Version]] = []
        self.drained_before: list[int] = []

    def drain(self) -> None:
        self.drained_before.append(len(self.pushed))

    def push(self, state: ModelState, version: Version) -> None:
        self.pushed.append((state, version))


class FakeServer:
    def __init__(self, checksum: str):
        async def remote():
            return checksum

        self.checksum = SimpleNamespace(remote=remote)


class FakeManager(CheckpointEngineManager):
    """verl's manager without Ray: the weights arrive, or the transfer fails."""

    def __init__(self, **_):
        self.backend = "fake"

    async def update_weights(self, global_steps=None):
        if self.fails:
            raise RuntimeError("a replica is gone")
        return {"sync/checksum": "sent"}


def synchronizer(*, served: str = "sent", verify: bool = True, fails: bool = False) -> ParameterSynchronizer:
    class Synchronizer(ParameterSynchronizer, FakeManager):
        def __init__(self):
            FakeManager.__init__(self)
            self.fails = fails
            self.replicas = [SimpleNamespace(replica_rank=0, servers=[FakeServer(served)])]
            self._status, self._versions = FakeStatus(), VersionTracker("m", 1)
            self._incarnation, self._verify = 1, verify

    # The cooperative chain is Synchronizer -> ParameterSynchronizer -> FakeManager -> CheckpointEngineManager.
    return Synchronizer()


def test_the_gate_is_closed_before_the_sync_and_opens_with_the_new_version():
    sync = synchronizer()
    asyncio.run(sync.update_weights(global_steps=7))
    assert sync._status.pushed == [(ModelState.SYNCING, Version(1, 0)), (ModelState.OPEN, Version(1, 7))]
    assert sync._versions.get() == Version(1, 7)


def test_calls_that_cannot_be_resumed_may_finish_before_the_sync():
    sync = synchronizer()
    asyncio.run(sync.update_weights(global_steps=7))
    assert sync._status.drained_before == [0]


def test_a_failed_transfer_leaves_the_gate_closed_and_the_version_as_it_was():
    sync = synchronizer(fails=True)
    with pytest.raises(RuntimeError, match="a replica is gone"):
        asyncio.run(sync.update_weights(global_steps=7))
    assert [state for state, _ in sync._status.pushed] == [ModelState.SYNCING]
    assert sync._versions.get() == Version(1, 0)


def test_other_weights_than_sent_are_never_opened():
    sync = synchronizer(served="other")
    with pytest.raises(WeightChecksumError, match="serves other, the trainer sent sent"):
        asyncio.run(sync.update_weights(global_steps=7))
    assert [state for state, _ in sync._status.pushed] == [ModelState.SYNCING]


def test_checksums_are_compared_only_on_demand():
    sync = synchronizer(served="other", verify=False)
    asyncio.run(sync.update_weights(global_steps=7))
    assert sync._status.pushed[-1][0] is ModelState.OPEN


def test_versions_never_go_back():
    tracker = VersionTracker("m", 1)
    tracker.set(Version(1, 4))
    with pytest.raises(ValueError, match="would go back"):
        tracker.set(Version(1, 3))
    tracker.set(Version(2, 3))
    assert tracker.get() == Version(2, 3)
