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
"""Replay: groups that a policy has trained fill up its batches while new ones are few (ingest/replay.py)."""

import asyncio

import pytest

from ..ingest import ledger_prune
from ..trajectory import Version
from .fakes.workflow_records import PLANNER, finish_task, queue_spec, with_ingestor

TARGET = 4


def replaying(**changes):
    replay = {"max_uses": 3, "max_age": 4, "max_share": 0.75} | changes.pop("replay", {})
    return queue_spec(**({"coalesce_s": 0.0} | changes), replay=replay)


async def train(ingestor, number: int, incarnation: int = 0, target: int = TARGET) -> dict[str, int] | None:
    """Take a batch at version ``number`` and train it; answers how often each of its groups was trained before."""
    batch = await ingestor.take(PLANNER, target, Version(incarnation, number), 0)
    if batch is None:
        return None
    await ingestor.mark_consumed(PLANNER, batch.batch_id, number + 1, incarnation)
    return {group.group_id.split("/")[0]: group.uses for group in batch.groups}


async def play(ingestor, *tasks: int, version: int = 0, incarnation: int = 0) -> None:
    for task in tasks:
        await finish_task(ingestor, task, version=version, incarnation=incarnation)


async def stats(ingestor):
    return (await ingestor.stats())[PLANNER]


def scenario(tmp_path, steps, spec=None, **changes):
    async def run(ingestor):
        await ingestor.register_policy(PLANNER, spec or replaying(), True)
        return await steps(ingestor)

    return with_ingestor(tmp_path, run, **changes)


class TestWhatIsReplayed:
    def test_a_short_batch_is_filled_up_with_the_newest_groups_that_were_trained(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            await play(ingestor, 4, 5, 6, 7, version=1)
            await train(ingestor, 1)
            await play(ingestor, 8, 9, version=2)
            return await train(ingestor, 2)

        assert scenario(tmp_path, steps) == {"e0-t8": 0, "e0-t9": 0, "e0-t7": 1, "e0-t6": 1}

    def test_nothing_is_replayed_while_there_are_new_groups_enough(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, *range(8))
            return await train(ingestor, 0), await train(ingestor, 1)

        first, second = scenario(tmp_path, steps)
        assert set(first.values()) == set(second.values()) == {0} and not first.keys() & second.keys()

    def test_new_groups_have_coalesce_s_to_come(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            await play(ingestor, 4, version=1)
            return await train(ingestor, 1)

        assert scenario(tmp_path, steps, replaying(coalesce_s=60)) is None
        assert len(scenario(tmp_path / "other", steps)) == 4

    @pytest.mark.parametrize(("share", "batch"), [(0.25, None), (0.5, None), (0.7, None), (0.75, 4), (0.9, 4)])
    def test_no_more_than_max_share_of_a_batch_is_replayed(self, tmp_path, share, batch):
        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            await play(ingestor, 4, version=1)
            return await train(ingestor, 1)

        found = scenario(tmp_path, steps, replaying(replay={"max_share": share}))
        assert (found and len(found)) == batch

    def test_a_batch_may_be_small_where_that_is_allowed(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            await play(ingestor, 4, version=1)
            return await train(ingestor, 1)

        spec = replaying(min_batch_groups=2, replay={"max_share": 0.5})
        assert scenario(tmp_path, steps, spec) == {"e0-t4": 0, "e0-t3": 1}

    def test_no_batch_is_replay_alone(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            return await train(ingestor, 1)

        assert scenario(tmp_path, steps, replaying(min_batch_groups=1)) is None

    @pytest.mark.parametrize("max_uses", [1, 2, 3])
    def test_a_group_is_in_max_uses_batches_at_most(self, tmp_path, max_uses):
        """Invariant 2. One use is no replay at all, which is the default."""

        async def steps(ingestor):
            seen = []
            for number in range(5):
                await play(ingestor, number, version=number)
                seen.append(await train(ingestor, number, target=2))
            return seen

        seen = scenario(tmp_path, steps, replaying(min_batch_groups=1, replay={"max_uses": max_uses, "max_age": 9}))
        uses = [groups[name] for groups in seen for name in groups]
        assert max(uses) < max_uses and all(len(groups) == min(2, max_uses, 1 + i) for i, groups in enumerate(seen))

    def test_a_group_is_in_one_batch_of_a_version_at_most(self, tmp_path):
        """With several steps per version (``trigger_parameter_sync_step``) it would be the same epoch again."""

        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await play(ingestor, 1)
            return await train(ingestor, 0)  # another step of the same version

        assert scenario(tmp_path, steps, replaying(min_batch_groups=1)) == {"e0-t1": 0}

    @pytest.mark.parametrize(
        ("age", "bound", "replayed"), [(2, None, True), (1, None, False), (9, 2, True), (9, 1, False)]
    )
    def test_replayed_groups_are_younger_than_max_age_and_max_staleness(self, tmp_path, age, bound, replayed):
        """Invariant 6 holds for them too; unlike waiting groups they are not dropped, for they were trained."""

        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await play(ingestor, 1, version=2)
            return await train(ingestor, 2), (await stats(ingestor))["dropped"]

        spec = replaying(min_batch_groups=1, max_staleness=bound, replay={"max_age": age})
        assert scenario(tmp_path, steps, spec) == ({"e0-t1": 0} | ({"e0-t0": 1} if replayed else {}), {})

    def test_groups_of_a_step_that_failed_are_not_tried_again(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await play(ingestor, 1, version=1)
            batch = await ingestor.take(PLANNER, TARGET, Version(0, 1), 0)
            await ingestor.drop(PLANNER, batch.batch_id, "non_finite")
            await play(ingestor, 2, version=1)
            return len(batch.groups), await train(ingestor, 1), await stats(ingestor)

        groups, after, found = scenario(tmp_path, steps, replaying(min_batch_groups=1))
        assert groups == 2 and after == {"e0-t2": 0}
        assert (found["trained"], found["dropped"], found["unaccounted"]) == (4, {"non_finite": 2}, 0)

    def test_a_retired_policy_replays_nothing(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await ingestor.retire(PLANNER)
            return (await stats(ingestor))["replay_groups"]

        assert scenario(tmp_path, steps, replaying(min_batch_groups=1)) == 0


class TestBooks:
    def test_a_row_stays_trained_and_its_further_uses_are_counted_apart(self, tmp_path):
        """Invariant 3 counts rows once. Production is ahead by new groups alone."""

        async def steps(ingestor):
            await play(ingestor, 0, 1, 2, 3)
            await train(ingestor, 0)
            await play(ingestor, 4, version=1)
            batch = await ingestor.take(PLANNER, TARGET, Version(0, 1), 0)
            taken = await stats(ingestor)
            await ingestor.mark_consumed(PLANNER, batch.batch_id, 2, 0)
            return taken, await stats(ingestor)

        taken, after = scenario(tmp_path, steps)
        assert (taken["trained"], taken["taken"], taken["replayed"]) == (8, 2, 0)
        assert (after["trained"], after["taken"], after["replayed"]) == (10, 0, 6)
        assert taken["unaccounted"] == after["unaccounted"] == 0
        assert taken["lead_groups"] == after["lead_groups"] == 1

    def test_uses_are_marked_with_the_step_that_trained_the_new_rows_or_not_at_all(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0, 1)
            await train(ingestor, 0, target=1)
            ledger = ingestor._state.ledger
            with pytest.raises(AssertionError, match="a row is trained once"):
                ledger.consume([1, 3], 0, 2, replayed=[1, 2])  # row 1 is not new
            with pytest.raises(AssertionError, match="only trained rows are replayed"):
                ledger.consume([3], 0, 2, replayed=[4])
            return ledger.replay_counts(), ledger.counts()[PLANNER]

        assert scenario(tmp_path, steps, replaying(min_batch_groups=1)) == ({}, {"trained": 2, None: 2})

    def test_a_new_process_knows_the_uses_that_the_restored_weights_have_seen(self, tmp_path):
        """Those of later steps are free again, as the rows that these steps consumed first are."""

        async def before(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await play(ingestor, 1, version=1)
            await train(ingestor, 1)
            await ingestor.add_checkpoint(PLANNER, 0, 2, "digest", "path")
            await play(ingestor, 2, version=2)
            return await train(ingestor, 2), (await stats(ingestor))["replayed"]

        spec = replaying(min_batch_groups=1)
        assert scenario(tmp_path, before, spec) == ({"e0-t2": 0, "e0-t1": 1, "e0-t0": 2}, 6)

        async def after(ingestor):
            incarnation = await ingestor.register_policy(PLANNER, spec, True, restored=(0, 2))
            found = await stats(ingestor)
            return found["replayed"], found["trained"], await train(ingestor, 2, incarnation)

        assert with_ingestor(tmp_path, after) == (2, 4, {"e0-t2": 0, "e0-t1": 1, "e0-t0": 2})

    def test_rows_that_may_be_replayed_are_not_pruned_and_counts_of_pruned_ones_stay(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await play(ingestor, 1, version=1)
            await train(ingestor, 1)
            await ingestor.add_checkpoint(PLANNER, 0, 2, "digest", "path")  # the initial weights need nothing now
            deleted = [await ingestor.prune()]
            await play(ingestor, 2, version=2)
            batches = [await train(ingestor, 2)]
            await play(ingestor, 3, version=4)
            batches.append(await train(ingestor, 4))
            deleted.append(await ingestor.prune())
            return deleted, batches, await stats(ingestor)

        spec = replaying(min_batch_groups=1, replay={"max_age": 2})
        deleted, batches, found = scenario(tmp_path, steps, spec)
        assert batches == [{"e0-t2": 0, "e0-t1": 1, "e0-t0": 2}, {"e0-t3": 0, "e0-t2": 1}]
        assert deleted == [0, 4], "the first two groups are too old after version 4, the third is not"
        assert (found["trained"], found["replayed"], found["unaccounted"]) == (8, 8, 0)

    def test_a_restore_while_the_ledger_is_pruned_keeps_what_may_be_replayed_now(self, tmp_path, monkeypatch):
        monkeypatch.setattr(ledger_prune, "_STEP", 2)  # a group at a time
        spec = replaying(min_batch_groups=1, replay={"max_age": 2})

        async def steps(ingestor):
            for number in range(3):
                await play(ingestor, number, version=number)
                await train(ingestor, number)
            await ingestor.add_checkpoint(PLANNER, 0, 3, "digest", "path")
            await play(ingestor, 3, version=3)
            await ingestor.take(PLANNER, 1, Version(0, 6), 0)  # far ahead: nothing trained is young enough any more
            pruning = asyncio.create_task(ingestor.prune())
            incarnation = await ingestor.register_policy(PLANNER, spec, True, restored=(0, 3))
            await pruning
            return await train(ingestor, 3, incarnation)

        replayed = scenario(tmp_path, steps, spec)
        assert replayed["e0-t3"] == 0 and "e0-t1" in replayed

    def test_a_job_without_replay_prunes_as_before(self, tmp_path):
        async def steps(ingestor):
            await play(ingestor, 0)
            await train(ingestor, 0)
            await ingestor.add_checkpoint(PLANNER, 0, 1, "digest", "path")
            return await ingestor.prune()

        assert scenario(tmp_path, steps, queue_spec(min_batch_groups=1, coalesce_s=0)) == 2
