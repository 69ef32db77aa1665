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
"""The ``gloo`` checkpoint engine: sends weights from a trainer's ranks to any number of rollout workers.

::

    trainer rank 0 ── bucket ──> broadcast (ProcessGroupGloo) ──> worker 1 ... worker n
          └──────── layout of each bucket (TCPStore) ──────────────────┘
    trainer ranks 1.. walk the weights too, because gathering a sharded tensor takes all of them, and send nothing

Store and process group live for one sync, on an ephemeral port of their own, so models never meet (C10) and a replica
that joined or left needs no special case. Every wait has a timeout.

Loaded in every process by ``actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=<this module>``.
"""

import asyncio
import inspect
import logging
import pickle
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .weights import checksum_of, tensor_digest

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Endpoint:
    """Where the sender's store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Chunk:
    """A piece of one tensor inside a bucket. Offsets and sizes are bytes."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset_in_tensor: int
    offset_in_bucket: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """What one broadcast holds. ``error`` tells the receivers that the sender gave up."""

    chunks: tuple[Chunk, ...]
    size: int
    last: bool
    error: str | None = None


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl's ``CheckpointEngine`` (``verl/checkpoint_engine/base.py``) over gloo, in CPU memory.

    Args:
        bucket_size: bytes of one broadcast; a larger tensor is split.
        is_master: this process is the sender.
        checksum: compute a SHA-256 of what is sent (metric ``sync/checksum``) and of what is received
            (``received_checksum``). Costs one pass over the weights on both sides.
        timeout_s: of every single wait.
        host: address the sender listens on; by default this Ray node's.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        checksum: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        host: str | None = None,
    ):
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.received_checksum: str | None = None
        self._checksum = checksum
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._rank = -1
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._buffer: torch.Tensor | None = None

    def _address(self) -> str:
        if self._host is None:
            self._host = ray.util.get_node_ip_address().strip("[]")
        return self._host

    def prepare(self) -> Endpoint | None:
        """The sender opens its store and says where; the others have nothing to say."""
        self.finalize()
        if not self.is_master:
            return None
        host = self._address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # Bound here and handed over, so that the store listens on this address only and no port can be lost.
            listener.bind((host, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),
            )
        return Endpoint(host, port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Endpoint | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 is the sender, workers follow; the trainer's other ranks (-1) are not in the group."""
        endpoint = metadata[0]
        assert endpoint is not None, "trainer rank 0 is the sender"
        size = 1 + rollout_world_size
        actor = {
            "rank": [0] + [-1] * (actor_wg_world_size - 1),
            "world_size": [size] * actor_wg_world_size,
            "endpoint": [endpoint] * actor_wg_world_size,
        }
        rollout = {
            "rank": list(range(1, size)),
            "world_size": [size] * rollout_world_size,
            "endpoint": [endpoint] * rollout_world_size,
        }
        return actor, rollout

    def init_process_group(self, rank: int, world_size: int, endpoint: Endpoint) -> None:
        """Join the group of one sync.

        Raises:
            RuntimeError: not everybody joined in time.
        """
        self._rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(
                endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=self._timeout
            )
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address())]
        options._timeout = self._timeout
        self._group = ProcessGroupGloo(PrefixStore("gloo", self._store), rank, world_size, options)
        self._buffer = torch.empty(self.bucket_size, dtype=torch.uint8)

    def finalize(self) -> None:
        """Leave the group and give the memory back."""
        self._group = None
        self._store = None
        self._buffer = None
        self._rank = -1

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Broadcast all weights; ranks outside the group only walk them.

        Returns:
            ``{"sync/checksum": ...}`` from the sender when asked for, else nothing.
        """
        if self._rank < 0:
            async for _ in _each(weights):
                pass
            return {}
        assert self._rank == 0, "workers do not send"
        sent = 0
        try:
            digests: dict[str, bytes] = {}
            chunks: list[Chunk] = []
            used = 0
            async for name, tensor in _each(weights):
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                if self._checksum:
                    digests[name] = tensor_digest(tensor)
                done = 0
                while True:
                    size = min(self.bucket_size - used, flat.numel() - done)
                    self._buffer[used : used + size] = flat[done : done + size]
                    chunks.append(Chunk(name, tensor.dtype, tensor.shape, done, used, size))
                    done, used = done + size, used + size
                    if used == self.bucket_size:
                        await self._broadcast(sent, Bucket(tuple(chunks), used, last=False))
                        sent, chunks, used = sent + 1, [], 0
                    if done == flat.numel():
                        break
            await self._broadcast(sent, Bucket(tuple(chunks), used, last=True))
        except Exception as error:
            # The receivers wait for this bucket: tell them, instead of letting them run into their timeout. Whatever it
            # was, it goes on and ends this sync, and with it the trainer: supervision tells and counts that.
            logger.warning("weights were not sent, bucket %d: %r", sent, error)
            failure = Bucket((), 0, last=True, error=f"{type(error).__name__}: {error}")
            self._store.set(_key(sent), pickle.dumps(failure))
            raise
        return {"sync/checksum": checksum_of(digests)} if self._checksum else {}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor); a tensor is valid until the next one is asked for.

        Raises:
            RuntimeError: the sender failed, or nothing came in time.
        """
        assert self._rank > 0, "the sender does not receive"
        self.received_checksum = None
        digests: dict[str, bytes] = {}
        partial: torch.Tensor | None = None
        number = 0
        while True:
            bucket = await asyncio.to_thread(self._receive, number)
            for chunk in bucket.chunks:
                piece = self._buffer[chunk.offset_in_bucket : chunk.offset_in_bucket + chunk.size]
                total = chunk.shape.numel() * chunk.dtype.itemsize
                if chunk.size < total:
                    if chunk.offset_in_tensor == 0:
                        partial = torch.empty(total, dtype=torch.uint8)
                    partial[chunk.offset_in_tensor : chunk.offset_in_tensor + chunk.size] = piece
                    if chunk.offset_in_tensor + chunk.size < total:
                        continue
                    piece, partial = partial, None
                elif chunk.offset_in_bucket % chunk.dtype.itemsize:
                    piece = piece.clone()  # a view of another type must be aligned
                tensor = piece.view(chunk.dtype).view(chunk.shape)
                if self._checksum:
                    digests[chunk.name] = tensor_digest(tensor)
                yield chunk.name, tensor
            if bucket.last:
                break
            number += 1
        if self._checksum:
            self.received_checksum = checksum_of(digests)

    async def _broadcast(self, number: int, bucket: Bucket) -> None:
        self._store.set(_key(number), pickle.dumps(bucket))
        await asyncio.to_thread(self._transfer, bucket.size)

    def _receive(self, number: int) -> Bucket:
        bucket: Bucket = pickle.loads(self._store.get(_key(number)))
        if bucket.error is not None:
            raise RuntimeError(f"the sender of the weights failed: {bucket.error}")
        self._transfer(bucket.size)
        return bucket

    def _transfer(self, size: int) -> None:
        if size:
            self._group.broadcast(self._buffer[:size], 0, self._timeout).wait()


def _key(number: int) -> str:
    return f"bucket/{number}"


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if inspect.isasyncgen(weights) or hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
