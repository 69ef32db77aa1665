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
"""Where a trainer's batches come from. PolicyTrainer knows only this protocol; queue, replay or files are behind it."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..trajectory import Trajectory, Version
from .baselines import Baseline
from .handle import TargetDiedError, call, invoke

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 120.0
"""A live ingestor answers within its poll and this many seconds, also when its disk is slow."""


@dataclass(frozen=True)
class Group:
    """A whole advantage group; ``agent_id`` is empty if its rows are of several agents.

    ``baselines``: what each row is compared with, where the group is too small to be compared with itself.
    """

    group_id: str
    agent_id: str
    trajectories: tuple[Trajectory, ...]
    baselines: tuple[Baseline, ...] | None = None
    uses: int = 0  # batches that trained it before; above 0 in replay


@dataclass(frozen=True)
class TakenBatch:
    """Whole groups for one training batch. It must be consumed or dropped."""

    batch_id: str
    groups: tuple[Group, ...]
    queue_groups: int = 0  # groups left in the queue
    stale_shares: dict[str, float] = field(default_factory=dict)  # lost as stale so far, by turns (accounts.py)
    partner_staleness: dict[str, list[int]] = field(default_factory=dict)  # ingest/partners.py


@dataclass(frozen=True)
class End:
    """No more batches will come, and nothing is wrong."""

    reason: str


@dataclass(frozen=True)
class ProducerDied:
    """No more batches will come, because their producer died."""

    cause: str


class BatchSource(Protocol):
    """What a trainer needs to know of its data."""

    async def next_batch(self, version: Version) -> TakenBatch | End | ProducerDied:
        """Wait for the next batch of a trainer whose weights are at ``version``."""
        ...

    def mark_consumed(self, version: Version) -> None:
        """The last batch was trained, towards ``version``."""
        ...

    def drop(self, reason: str) -> None:
        """The last batch must not be trained again (a reason of ``reasons.DROP_REASONS``)."""
        ...

    async def flush(self) -> None:
        """Wait until what was reported about batches is committed."""
        ...

    async def may_publish(self, version: Version) -> None:
        """Wait until ``version`` may be published."""
        ...

    async def hold(self, version: Version, batches_left: int) -> None:
        """Wait until a batch may be taken; ``batches_left`` more make the version after ``version``."""
        ...

    async def synced(self) -> None:
        """The version that ``may_publish`` let pass is served."""
        ...


class IngestBatchSource:
    """Takes batches from the trajectory ingestor.

    Reports about the last batch are sent at once, so that a synchronous hook of a trainer can make them, and awaited
    before the next batch or by ``flush``.

    Args:
        ingestor: a ``TrajectoryIngestor`` or its actor handle.
        model_id: the policy.
        groups: target size of a batch.
        poll_s: longest wait of one call, in seconds.
    """

    def __init__(self, ingestor: Any, model_id: str, *, groups: int, poll_s: float):
        self._ingestor = ingestor
        self.model_id = model_id
        self.groups = groups
        self._poll_s = poll_s
        self._batch_id: str | None = None
        self._report: Awaitable[None] | None = None

    async def next_batch(self, version: Version) -> TakenBatch | End | ProducerDied:
        """Poll until there is a batch or there will be none.

        Raises:
            ValueError: the last batch was neither consumed nor dropped.
        """
        if self._batch_id is not None:
            raise ValueError(f"policy {self.model_id}: batch {self._batch_id} is still open")
        try:
            await self.flush()
            while True:
                async with asyncio.timeout(self._poll_s + ANSWER_MARGIN_S):
                    answer = await call(self._ingestor, "take", self.model_id, self.groups, version, self._poll_s)
                if answer is not None:
                    break
        except TargetDiedError as error:
            return ProducerDied(str(error))
        except TimeoutError:
            return ProducerDied(f"the ingestor did not answer within {self._poll_s + ANSWER_MARGIN_S:g} s")
        if isinstance(answer, TakenBatch):
            self._batch_id = answer.batch_id
        return answer

    def mark_consumed(self, version: Version) -> None:
        """The last batch was trained by the step that leads to ``version``."""
        self._send("mark_consumed", version.number, version.incarnation)

    def drop(self, reason: str) -> None:
        """Drop the last batch under ``reason``."""
        self._send("drop", reason)

    async def flush(self) -> None:
        """Wait for the report about the last batch, if one is on its way.

        Raises:
            TargetDiedError: the ingestor died before it answered.
        """
        report, self._report = self._report, None
        if report is not None:
            await report

    async def hold(self, version: Version, batches_left: int) -> None:
        """Wait until a batch may be taken; see ``TrajectoryIngestor.hold``. That it died is told by ``next_batch``."""
        asked = (self.model_id, self.groups, version, batches_left, self._poll_s)
        try:
            while not await call(self._ingestor, "hold", *asked):
                pass
        except TargetDiedError:
            return

    async def may_publish(self, version: Version) -> None:
        """Wait until ``version`` may be published; see ``TrajectoryIngestor.may_publish``."""
        while not await call(self._ingestor, "may_publish", self.model_id, version, self._poll_s):
            pass

    async def synced(self) -> None:
        """Policies that wait for the end of this sync may go on; see ``TrajectoryIngestor.synced``."""
        await call(self._ingestor, "synced", self.model_id)

    def _send(self, method: str, *args: Any) -> None:
        assert self._batch_id is not None, f"{method} without a batch"
        assert self._report is None, "one report per batch"
        report = invoke(self._ingestor, method, self.model_id, self._batch_id, *args)
        self._batch_id = None
        try:
            self._report = asyncio.get_running_loop().create_task(report)
        except RuntimeError:  # called outside a loop: awaited by flush
            self._report = report
