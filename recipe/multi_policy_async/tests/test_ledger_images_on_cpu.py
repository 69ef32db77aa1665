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
"""Images in the ledger: rows give them back, each is stored once, and goes with the last row that shows it."""

import sqlite3

import pyarrow.parquet as pq
import pytest

from ..ledger import main
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, finish_task, queue_spec, record, register_both, trajectory, with_ingestor

CAT, DOG = b"cat" * 1000, b"dog" * 1000


def stored(folder) -> set[bytes]:
    with sqlite3.connect(folder / "ledger.sqlite") as disk:
        images = {data for (data,) in disk.execute("SELECT data FROM images")}
    disk.close()
    return images


async def play(ingestor, task: int, *shown: tuple[bytes, ...], **changes) -> None:
    """A task of one member per entry, each with one row that shows these images."""
    ids = [f"e0-t{task}-s{sample}-a0" for sample in range(len(shown))]
    for workflow_id in ids:
        await ingestor.issue(workflow_id, len(shown))
    for workflow_id, images in zip(ids, shown, strict=True):
        await ingestor.ingest(record(workflow_id, trajectory(workflow_id, images=images, **changes)))


async def take(ingestor, incarnation: int = 0):
    batch = await ingestor.take(PLANNER, 1, Version(incarnation, 0), 1)
    return batch.batch_id, [row.images for group in batch.groups for row in group.trajectories]


def test_a_taken_row_has_its_images_in_their_order_and_equal_ones_are_stored_and_sent_once(tmp_path):
    shown = [(CAT, DOG), (DOG, CAT, CAT), ()]

    async def scenario(ingestor):
        await register_both(ingestor)
        await play(ingestor, 0, *shown)
        return (await take(ingestor))[1]

    images = with_ingestor(tmp_path, scenario)
    assert images == shown and images[0][0] is images[1][1] is images[1][2]
    assert stored(tmp_path) == {CAT, DOG}


def test_a_row_that_is_trained_again_after_a_restore_has_its_images(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(), True)
        await play(ingestor, 0, (CAT,), (CAT,))
        batch_id, _ = await take(ingestor)
        await ingestor.mark_consumed(PLANNER, batch_id, 1, 0)
        incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True)
        return (await take(ingestor, incarnation))[1]

    assert with_ingestor(tmp_path, scenario) == [(CAT,), (CAT,)]


def test_replayed_rows_have_their_images(tmp_path):
    async def scenario(ingestor):
        spec = queue_spec(replay={"max_uses": 2, "max_age": 4, "max_share": 0.5}, coalesce_s=0.0)
        await ingestor.register_policy(PLANNER, spec, True)
        await play(ingestor, 0, (CAT,), (CAT,))
        batch_id, _ = await take(ingestor)
        await ingestor.mark_consumed(PLANNER, batch_id, 1, 0)
        await play(ingestor, 1, (DOG,), (DOG,), version=1)
        batch = await ingestor.take(PLANNER, 2, Version(0, 1), 1)
        return sorted(row.images for group in batch.groups for row in group.trajectories)

    assert with_ingestor(tmp_path, scenario) == [(CAT,)] * 2 + [(DOG,)] * 2


def test_an_image_is_pruned_with_the_last_row_that_shows_it(tmp_path):
    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(max_queue_groups=1), True)
        await play(ingestor, 0, (CAT, DOG), (CAT,))  # surplus, once the next one comes
        await play(ingestor, 1, (CAT,), ())
        await ingestor.prune()
        first = stored(tmp_path)
        await finish_task(ingestor, 2)
        await ingestor.prune()
        return first, stored(tmp_path)

    assert with_ingestor(tmp_path, scenario) == ({CAT}, set())


@pytest.mark.parametrize("other", [(DOG,), (), (CAT, CAT)])
def test_a_record_with_other_images_is_another_one(tmp_path, other):
    async def scenario(ingestor):
        await register_both(ingestor)
        await ingestor.issue("e0-t0-s0-a0", 1)
        first = record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", images=(CAT,)))
        assert await ingestor.ingest(first) == await ingestor.ingest(first)
        with pytest.raises(ValueError, match="other content"):
            await ingestor.ingest(record("e0-t0-s0-a0", trajectory("e0-t0-s0-a0", images=other)))

    with_ingestor(tmp_path, scenario)


def test_export_writes_the_images_of_each_row(tmp_path):
    async def scenario(ingestor):
        await register_both(ingestor)
        await play(ingestor, 0, (CAT, DOG), ())

    with_ingestor(tmp_path, scenario)
    assert main([str(tmp_path), "export", str(tmp_path / "rows.parquet")]) == 0
    assert pq.read_table(tmp_path / "rows.parquet").column("images").to_pylist() == [[CAT, DOG], []]
