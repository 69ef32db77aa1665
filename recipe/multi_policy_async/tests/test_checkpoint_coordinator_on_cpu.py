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
"""Which saves count and which are deleted: the ledger decides, the manifest and the files follow."""

import asyncio
import json

import pytest

from ..checkpoint_coordinator import CheckpointCoordinator, CheckpointSchedule, folder_digest
from ..configuration.schema import CheckpointSpec
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, SOLVER, queue_spec, with_ingestor

SPEC = CheckpointSpec(every_updates=1, at_end=False, keep=None)


def save(run_dir, model_id: str, incarnation: int, step: int):
    """Write files as verl would and describe them as the trainer does."""
    schedule = CheckpointSchedule(SPEC, run_dir, model_id)
    folder = schedule.folder(incarnation) / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"{model_id} {incarnation}.{step}")
    return schedule.describe(Version(incarnation, step))


def on_disk(run_dir) -> list[str]:
    return sorted(str(path.relative_to(run_dir / "checkpoints")) for path in run_dir.glob("checkpoints/*/*/*_step_*"))


def scenario(run_dir, steps, *, keep=None):
    """Run ``await steps(coordinator, ingestor)`` and return its answer."""

    async def run(ingestor):
        for model_id in (PLANNER, SOLVER):
            await ingestor.register_policy(model_id, queue_spec(), True)
        coordinator = CheckpointCoordinator(ingestor, run_dir, keep=keep)
        await coordinator.start()
        return await steps(coordinator, ingestor)

    return with_ingestor(run_dir, run)


def manifest(run_dir):
    return json.loads((run_dir / "checkpoints" / "manifest.json").read_text())


def test_the_manifest_names_its_ledger_before_there_is_a_checkpoint(tmp_path):
    async def steps(coordinator, ingestor):
        return await ingestor.ledger_id()

    ledger_id = scenario(tmp_path, steps)
    assert manifest(tmp_path) == {"ledger_id": ledger_id, "checkpoints": []}


def test_a_saved_version_is_in_the_ledger_with_a_path_that_moves_with_the_run(tmp_path):
    async def steps(coordinator, ingestor):
        await coordinator.commit(save(tmp_path, SOLVER, 0, 1))
        return await ingestor.checkpoints()

    path = f"checkpoints/{SOLVER}/incarnation_0/global_step_1"
    assert scenario(tmp_path, steps) == [(SOLVER, 0, 1, path, folder_digest(tmp_path / path))]
    assert [each["path"] for each in manifest(tmp_path)["checkpoints"]] == [path]


def test_only_the_newest_checkpoints_of_a_policy_are_kept(tmp_path):
    async def steps(coordinator, ingestor):
        await coordinator.commit(save(tmp_path, SOLVER, 0, 1))
        for step in range(1, 5):
            await coordinator.commit(save(tmp_path, PLANNER, 0, step))
        return [row[:3] for row in await ingestor.checkpoints()]

    assert scenario(tmp_path, steps, keep=2) == [(PLANNER, 0, 3), (PLANNER, 0, 4), (SOLVER, 0, 1)]
    kept = [f"{PLANNER}/incarnation_0/global_step_{step}" for step in (3, 4)]
    assert on_disk(tmp_path) == [*kept, f"{SOLVER}/incarnation_0/global_step_1"]
    assert [each["step"] for each in manifest(tmp_path)["checkpoints"]] == [3, 4, 1]


def test_newest_goes_by_incarnation_first_since_numbers_are_used_again(tmp_path):
    async def steps(coordinator, ingestor):
        for step in (2, 4, 6):
            await coordinator.commit(save(tmp_path, PLANNER, 0, step))
        await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 4))
        await coordinator.commit(save(tmp_path, PLANNER, 1, 5))
        return await coordinator.newest(PLANNER), await coordinator.newest(SOLVER)

    newest, none = scenario(tmp_path, steps)
    assert (newest.incarnation, newest.step, none) == (1, 5, None)


def test_files_that_no_row_names_are_swept_away(tmp_path):
    """A save that a crash cut, and those of a branch that a restore left."""

    async def steps(coordinator, ingestor):
        for step in (2, 4):
            await coordinator.commit(save(tmp_path, PLANNER, 0, step))
        save(tmp_path, PLANNER, 0, 6)  # never committed
        save(tmp_path, SOLVER, 0, 2)  # another policy may be saving now
        await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 2))
        await coordinator.sweep(PLANNER)

    scenario(tmp_path, steps)
    assert on_disk(tmp_path) == [f"{policy}/incarnation_0/global_step_2" for policy in (PLANNER, SOLVER)]
    assert [each["step"] for each in manifest(tmp_path)["checkpoints"]] == [2]


def test_an_incarnation_that_left_no_checkpoint_leaves_no_folder(tmp_path):
    async def steps(coordinator, ingestor):
        save(tmp_path, PLANNER, 0, 2)
        await coordinator.sweep(PLANNER)

    scenario(tmp_path, steps)
    assert not list((tmp_path / "checkpoints" / PLANNER).iterdir())


def test_a_row_goes_before_its_files(tmp_path):
    """So that the ledger never names a checkpoint that is not there, wherever a crash falls."""

    async def steps(coordinator, ingestor):
        for step in (1, 2):
            await coordinator.commit(save(tmp_path, PLANNER, 0, step))
        forget = ingestor.remove_checkpoint

        async def crash(*key):
            await forget(*key)
            raise KeyboardInterrupt

        ingestor.remove_checkpoint = crash
        with pytest.raises(KeyboardInterrupt):
            await coordinator.commit(save(tmp_path, PLANNER, 0, 3))
        return [row[2] for row in await ingestor.checkpoints()]

    assert scenario(tmp_path, steps, keep=2) == [2, 3]
    assert len(on_disk(tmp_path)) == 3


def test_saves_of_several_policies_at_once_are_all_in_the_manifest(tmp_path):
    async def steps(coordinator, ingestor):
        await asyncio.gather(*(coordinator.commit(save(tmp_path, model_id, 0, 1)) for model_id in (PLANNER, SOLVER)))

    scenario(tmp_path, steps)
    assert [each["model_id"] for each in manifest(tmp_path)["checkpoints"]] == [PLANNER, SOLVER]


def test_the_digest_covers_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    first = folder_digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    renamed = folder_digest(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, renamed, folder_digest(tmp_path)}) == 3


def test_a_folder_without_files_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no files"):
        folder_digest(tmp_path)
