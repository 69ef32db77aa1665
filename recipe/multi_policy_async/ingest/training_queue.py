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
"""A policy's queue as its trainer sees it: a ``BatchSource`` with the methods of verl's queue client.

The queue itself (group_queue.py) lives in the ingest process: ids there, rows are read from the ledger when a batch is
taken. So this is a view, cheap to make and to lose.
"""

from typing import Any

from ..trajectory import Version, WorkflowRecord
from .batch_source import End, IngestBatchSource, ProducerDied, TakenBatch
from .handle import call


class ProducerDiedError(RuntimeError):
    """There will be no more samples, because their producer died."""


class TrainingQueue(IngestBatchSource):
    """verl's ``MessageQueueClient`` (fully_async_policy/message_queue.py) on one policy's queue.

    Differences: a sample is a batch of whole groups, a full queue is counted and never silent, the end of the data and
    the death of its producer are told apart. Not here: ``put_validate`` and ``get_validate`` (evaluations have a way of
    their own), ``get_memory_usage`` (rows are on disk) and the ``_sync`` variants, which would block an actor's loop.
    """

    async def put_sample(self, sample: WorkflowRecord) -> bool:
        """Hand in a terminal record; its rows of all policies enter together.

        Raises:
            ValueError: the ingestor refuses the record.
        """
        await call(self._ingestor, "ingest", sample)
        return True

    async def get_sample(self, version: Version) -> tuple[TakenBatch, int] | None:
        """The next batch of a trainer at ``version`` with the number of groups left, or ``None`` at the end.

        Raises:
            ProducerDiedError: with the cause.
        """
        answer = await self.next_batch(version)
        if isinstance(answer, ProducerDied):
            raise ProducerDiedError(f"policy {self.model_id}: {answer.cause}")
        return None if isinstance(answer, End) else (answer, answer.queue_groups)

    async def get_queue_size(self) -> int:
        """Groups that wait."""
        return (await self._stats())["queue_groups"]

    async def get_statistics(self) -> dict[str, Any]:
        """verl's names, in groups for the queue and in rows for the totals, and this policy's account beside them."""
        stats = await self._stats()
        return {
            "queue_size": stats["queue_groups"],
            "max_queue_size": stats["max_queue_groups"],
            "total_produced": stats["accepted"],
            "total_consumed": stats["trained"],
            "dropped_samples": sum(stats["dropped"].values()),
            **stats,
        }

    async def clear_queue(self) -> None:
        """Drop what waits, as ``shutdown``."""
        await call(self._ingestor, "clear", self.model_id)

    async def shutdown(self) -> None:
        """The policy trains no more: whoever waits gets the end, later rows are ``retired``."""
        await call(self._ingestor, "retire", self.model_id)

    async def _stats(self) -> dict[str, Any]:
        return (await call(self._ingestor, "stats"))[self.model_id]
