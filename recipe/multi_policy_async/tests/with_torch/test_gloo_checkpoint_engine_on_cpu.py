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
"""The gloo checkpoint engine: trainer ranks and rollout workers, each in a thread of its own, over real sockets."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from recipe.multi_policy_async.backends.cpu.gloo_checkpoint_engine import GlooCheckpointEngine
from recipe.multi_policy_async.backends.cpu.weights import checksum_of, tensor_digest

pytestmark = pytest.mark.slow

LOOPBACK = "127.0.0.1"


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(70, 11, generator=generator),
        "scalar": torch.tensor(3.5),
        "odd": torch.randint(0, 9, (7,), generator=generator, dtype=torch.uint8),
        "half": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(6, 8, generator=generator).t(),
        "counts": torch.arange(5),
    }


class Sync:
    """One sync from ``senders`` trainer ranks to ``receivers`` workers, driven as verl's manager drives it."""

    def __init__(
        self, senders: int, receivers: int, *, bucket: int = 256, checksum: bool = True, timeout_s: float = 20
    ):
        make = {"bucket_size": bucket, "checksum": checksum, "timeout_s": timeout_s, "host": LOOPBACK}
        self.senders = [GlooCheckpointEngine(is_master=rank == 0, **make) for rank in range(senders)]
        self.receivers = [GlooCheckpointEngine(**make) for _ in range(receivers)]
        self.engines = self.senders + self.receivers

    def start(self) -> None:
        metadata = [engine.prepare() for engine in self.engines]
        actor, rollout = GlooCheckpointEngine.build_topology(len(self.senders), len(self.receivers), metadata)
        arguments = [
            {name: values[i] for name, values in side.items()}
            for side, count in ((actor, len(self.senders)), (rollout, len(self.receivers)))
            for i in range(count)
        ]
        self._all([lambda e=e, a=a: e.init_process_group(**a) for e, a in zip(self.engines, arguments, strict=True)])

    def transfer(self, weights: Callable[[int], object]) -> tuple[list[Future], list[Future]]:
        """Futures of every sender (``weights(rank)`` is what it walks) and of every receiver, all done."""
        sends = [lambda e=e, r=r: asyncio.run(e.send_weights(weights(r))) for r, e in enumerate(self.senders)]
        receives = [lambda e=e: asyncio.run(collect(e)) for e in self.receivers]
        with ThreadPoolExecutor(len(self.engines)) as pool:
            futures = [pool.submit(call) for call in sends + receives]
        return futures[: len(sends)], futures[len(sends) :]

    def finish(self) -> None:
        for engine in self.engines:
            engine.finalize()

    def _all(self, calls: list[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            for future in [pool.submit(call) for call in calls]:
                future.result()


async def collect(engine: GlooCheckpointEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


def assert_same(received: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("bucket", [16, 100, 1 << 20])
def test_every_worker_receives_what_the_first_trainer_rank_sent_in_any_bucket_size(bucket):
    sync, weights = Sync(2, 3, bucket=bucket), some_weights()
    sync.start()
    sends, receives = sync.transfer(lambda rank: iter(weights.items()))
    expected = checksum_of({name: tensor_digest(tensor) for name, tensor in weights.items()})
    assert [future.result() for future in sends] == [{"sync/checksum": expected}, {}]
    for engine, future in zip(sync.receivers, receives, strict=True):
        assert_same(future.result(), weights)
        assert engine.received_checksum == expected
    sync.finish()


def test_trainer_ranks_that_send_nothing_still_walk_all_weights():
    """Gathering a sharded tensor is collective: a rank that stops walking would hang the sender."""
    sync, walked = Sync(3, 1), {0: [], 1: [], 2: []}
    weights = some_weights()

    def walk(rank):
        for name, tensor in weights.items():
            walked[rank].append(name)
            yield name, tensor

    sync.start()
    for future in sum(sync.transfer(walk), []):
        future.result()
    assert walked == dict.fromkeys(range(3), list(weights))


def test_syncs_follow_each_other_also_with_another_number_of_workers():
    sync = Sync(1, 2)
    for seed, receivers in ((1, 2), (2, 3), (3, 1)):
        spare = [GlooCheckpointEngine(256, checksum=True, timeout_s=20, host=LOOPBACK) for _ in range(2)]
        sync.receivers = (sync.receivers + spare)[:receivers]
        sync.engines = sync.senders + sync.receivers
        sync.start()
        _, receives = sync.transfer(lambda rank, seed=seed: iter(some_weights(seed).items()))
        for future in receives:
            assert_same(future.result(), some_weights(seed))
        sync.finish()


def test_two_models_syncing_at_once_do_not_meet():
    pair = [Sync(1, 2), Sync(1, 2)]
    for sync in pair:
        sync.start()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(s.transfer, lambda _, i=i: iter(some_weights(i).items())) for i, s in enumerate(pair)]
    for index, future in enumerate(runs):
        for received in future.result()[1]:
            assert_same(received.result(), some_weights(index))


def test_without_checksum_none_is_computed():
    sync = Sync(1, 1, checksum=False)
    sync.start()
    sends, receives = sync.transfer(lambda rank: iter(some_weights().items()))
    assert sends[0].result() == {}
    assert_same(receives[0].result(), some_weights())
    assert sync.receivers[0].received_checksum is None


def test_weights_may_come_from_an_async_iterator():
    sync, weights = Sync(2, 1), some_weights()

    async def walk():
        for item in weights.items():
            await asyncio.sleep(0)
            yield item

    sync.start()
    _, receives = sync.transfer(lambda rank: walk())
    assert_same(receives[0].result(), weights)


def test_a_sender_that_fails_half_way_tells_its_receivers_at_once():
    sync = Sync(1, 2)

    def walk(rank):
        yield from list(some_weights().items())[:2]
        raise ArithmeticError("gather failed")

    sync.start()
    started = time.monotonic()
    sends, receives = sync.transfer(walk)
    assert time.monotonic() - started < 10
    assert isinstance(sends[0].exception(), ArithmeticError)
    for future in receives:
        assert "gather failed" in str(future.exception())


def test_a_worker_that_never_joins_ends_the_wait_within_the_timeout():
    sync = Sync(1, 1, timeout_s=1)
    endpoint = sync.senders[0].prepare()
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        sync.senders[0].init_process_group(rank=0, world_size=2, endpoint=endpoint)
    assert time.monotonic() - started < 15


def test_a_receiver_whose_sender_sends_nothing_gives_up_within_the_timeout():
    sync = Sync(1, 1, timeout_s=1)
    sync.start()
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        asyncio.run(collect(sync.receivers[0]))
    assert time.monotonic() - started < 15


def test_the_engine_is_found_under_its_name_and_listens_on_its_own_address_only():
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
    engine = GlooCheckpointEngine(256, is_master=True, host=LOOPBACK)
    first, second = engine.prepare(), engine.prepare()
    assert first.host == LOOPBACK
    assert first.port != second.port
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [fields[1] for fields in sockets if fields[3] == "0A"]
    assert f"0100007F:{second.port:04X}" in listening
    engine.finalize()
