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
"""Random interleavings of finalize, retry, take, train, drop, restore and crash: nothing is lost, doubled or split.

The machine keeps its own books, by trajectory id, and never reads the ingestor's counters to fill them. The solver
replays, the planner does not. Disk work runs without its thread and the clock stands still: hypothesis repeats and
shortens what it tried, which must then go the same way.
"""

import asyncio
import sqlite3
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.multi_policy_async.ingest.batch_source import TakenBatch
from recipe.multi_policy_async.ingest.reasons import DROP_REASONS
from recipe.multi_policy_async.tests.fakes.inline_serial import without_a_thread
from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    ingest_spec,
    queue_spec,
    record,
    trajectory,
)
from recipe.multi_policy_async.trajectory import Version, WorkflowId, WorkflowRecord
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor

MODELS = (PLANNER, SOLVER)
MAX_STALENESS = 2
MAX_USES = {PLANNER: 1, SOLVER: 2}
SMALL_GROUPS = {PLANNER: {}, SOLVER: {"on_small_group": "ema", "filter_equal_rewards": True}}


def spec_of(model):
    return queue_spec(
        max_lead_groups=6,
        max_queue_groups=4,
        max_staleness=MAX_STALENESS,
        coalesce_s=0,
        replay={"max_uses": MAX_USES[model], "max_age": 3, "max_share": 0.75},
        **SMALL_GROUPS[model],
    )


class Policy:
    """A policy's weights as the list of training steps that made them; a restore cuts the list."""

    def __init__(self):
        self.version = Version(0, 0)
        self.steps: dict[Version, tuple[int, ...]] = {self.version: ()}  # version -> the steps behind its weights
        self.rows: dict[int, set[str]] = {}  # step -> rows it trained
        self.saved: list[Version] = []
        self.batch: TakenBatch | None = None
        self.retired = False
        self.pruned = self.pruned_behind_a_checkpoint = False

    @property
    def uses(self) -> Counter[str]:
        """Batches that the weights have seen, by row."""
        return Counter(row for step in self.steps[self.version] for row in self.rows[step])

    @property
    def starts(self) -> list[Version | None]:
        """Checkpoints, and the initial weights while nothing was pruned that they would need."""
        return [*self.saved[::-1], *([] if self.pruned_behind_a_checkpoint else [None])]

    def descends_from(self, version: Version) -> bool:
        steps = self.steps[version]
        return self.steps[self.version][: len(steps)] == steps

    def train(self, rows: set[str]) -> Version:
        step = len(self.rows)
        self.rows[step] = rows
        after = self.version._replace(number=self.version.number + 1)
        self.steps[after] = (*self.steps[self.version], step)
        self.version, self.batch = after, None
        return after

    def start(self, incarnation: int, at: Version | None) -> None:
        self.version = Version(incarnation, 0 if at is None else at.number)
        self.steps[self.version] = () if at is None else self.steps[at]
        self.saved = [saved for saved in self.saved if self.descends_from(saved)]  # other branches are given up
        self.batch = None


class DataPath(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ingestor = self._open()
        self.tasks: dict[int, int] = {}  # task -> members
        self.attempts: dict[tuple[int, int], int] = {}  # in flight: (task, sample) -> attempt
        self.replaced: list[str] = []  # ids of attempts that a later one replaced
        self.ended: dict[tuple[int, int], WorkflowRecord] = {}  # (task, sample) -> its record
        self.group_rows: dict[str, set[str]] = defaultdict(set)  # trainable rows of a group
        self.damaged: set[str] = set()
        self.accepted: Counter[str] = Counter()  # rows by model
        self.policies = {model: Policy() for model in MODELS}

    def _open(self):
        return without_a_thread(TrajectoryIngestor(self.path, ingest_spec(), clock=lambda: 0.0))

    def do(self, coroutine):
        result = self.runner.run(asyncio.wait_for(coroutine, 20))
        self.runner.run(_the_rest())
        return result

    @initialize()
    def register(self):
        for model in MODELS:
            self.do(self.ingestor.register_policy(model, spec_of(model), True))

    def teardown(self):
        self.do(self.ingestor.close())
        self.runner.close()
        self.folder.cleanup()

    # -- production ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), members=st.integers(1, 3), ended=st.integers(0, 3))
    def start_a_task(self, data, members, ended, newest=False):
        """Most of its workflows end at once, so that there is something to train."""
        task = len(self.tasks)
        self.tasks[task] = members
        for sample in range(members):
            assert self.do(self.ingestor.issue(f"e0-t{task}-s{sample}-a0", members)) == "issued"
            self.attempts[task, sample] = 0
        for sample in range(members if ended else members - 1):
            sent = self._record((task, sample), data, newest)
            self.do(self.ingestor.ingest(sent))
            self._note((task, sample), sent)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def replace_an_attempt(self, data):
        task, sample = data.draw(st.sampled_from(sorted(self.attempts)))
        attempt = self.attempts[task, sample]
        self.replaced.append(f"e0-t{task}-s{sample}-a{attempt}")
        self.do(self.ingestor.issue(f"e0-t{task}-s{sample}-a{attempt + 1}", self.tasks[task]))
        self.attempts[task, sample] += 1

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), cancel_after=st.none() | st.integers(0, 6))
    def end_some_workflows_together(self, data, cancel_after):
        """Some of the calls are cancelled, then repeated, as a client does that lost its connection."""
        members = data.draw(st.lists(st.sampled_from(sorted(self.attempts)), min_size=1, max_size=4, unique=True))
        records = {member: self._record(member, data) for member in members}

        async def send():
            sending = [asyncio.ensure_future(self.ingestor.ingest(each)) for each in records.values()]
            for _ in range(cancel_after or 0):
                await asyncio.sleep(0)
            if cancel_after is not None:
                sending[0].cancel()
            await asyncio.wait(sending)
            return [await self.ingestor.ingest(each) for each in records.values()]

        answers = self.do(send())
        for member, answer in zip(members, answers, strict=True):
            self._note(member, records[member])
            assert answer == Counter(row.model_id for row in records[member].trajectories)

    def _record(self, member, data, newest=False):
        task, sample = member
        name = f"e0-t{task}-s{sample}-a{self.attempts[member]}"
        status = "ok" if newest else data.draw(st.sampled_from(("ok", "ok", "ok", "ok", "ok", "failed")))
        rows = []
        for model, policy in self.policies.items():
            for row in range(1 if newest else data.draw(st.sampled_from((1, 2, 0)))):
                # Of any weights that were ever served, lost ones included.
                served = sorted(policy.steps)[-5:]
                version = policy.version if newest else data.draw(st.sampled_from(served))
                sampled = {"version": version.number, "incarnation": version.incarnation}
                reward = float(sample % 2) if newest else data.draw(st.sampled_from((0.0, 1.0)))
                rows.append(trajectory(name, model=model, row=row, reward=reward, **sampled))
        return record(name, *rows, status=status)

    def _note(self, member, sent):
        del self.attempts[member]
        self.ended[member] = sent
        for row in sent.trajectories:
            self.accepted[row.model_id] += 1
            if sent.status == "ok" and not self.policies[row.model_id].retired:
                self.group_rows[f"e0-t{member[0]}/{row.agent_id}"].add(row.trajectory_id)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def repeat_a_finalize(self, data):
        sent = self.ended[data.draw(st.sampled_from(sorted(self.ended)))]
        self._late(sent, Counter(row.model_id for row in sent.trajectories))

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def a_replaced_attempt_reports_late(self, data):
        name = data.draw(st.sampled_from(self.replaced))
        self._late(record(name, trajectory(name)), {})

    def _late(self, sent, expected):
        try:
            assert self.do(self.ingestor.ingest(sent)) == expected
        except ValueError as refusal:
            assert "never issued" in str(refusal) and self.pruned, "only what was pruned is forgotten"

    @property
    def pruned(self):
        return any(policy.pruned for policy in self.policies.values())

    # -- training --------------------------------------------------------------------------------------------------

    @rule(data=st.data(), model=st.sampled_from((SOLVER, SOLVER, PLANNER)), rounds=st.integers(1, 3))
    def play_and_train(self, data, model, rounds):
        """What mostly happens: a task is played by the weights of now, and a batch is trained."""
        for _ in range(rounds):
            self.start_a_task(data, 2, 2, newest=True)
            self.take(model, 3, None)
            self.settle(model, "train")

    @rule(model=st.sampled_from(MODELS), groups=st.integers(1, 3), cancel_after=st.none() | st.integers(0, 8))
    def take(self, model, groups, cancel_after):
        policy = self.policies[model]
        if policy.batch is not None:
            return

        async def taking():
            call = asyncio.ensure_future(self.ingestor.take(model, groups, policy.version, 0))
            if cancel_after is not None:
                for _ in range(cancel_after):
                    await asyncio.sleep(0)
                call.cancel()
            await asyncio.wait({call})
            return None if call.cancelled() else call.result()

        batch = self.do(taking())
        if not isinstance(batch, TakenBatch):
            return
        event("a batch was taken")
        policy.batch = batch
        assert any(group.uses == 0 for group in batch.groups), "no batch is replay alone"
        assert len({group.group_id for group in batch.groups}) == len(batch.groups), "a group is in a batch once"
        for group in batch.groups:
            rows = {row.trajectory_id for row in group.trajectories}
            assert rows == self.group_rows[group.group_id] - self.damaged, "a group is whole"
            if len(rows) > 1:
                assert model == PLANNER or len({row.reward for row in group.trajectories}) > 1, "else it is filtered"
            assert (group.baselines is not None) == (model == SOLVER and len(rows) == 1)
            uses = {policy.uses[row] for row in rows}
            assert uses == {group.uses} and group.uses < MAX_USES[model], "invariant 2"
            if group.uses:
                event("a group was replayed")
            task = WorkflowId.parse(group.trajectories[0].workflow_id).task
            assert all((task, sample) in self.ended for sample in range(self.tasks[task])), "its task is over"
            for row in group.trajectories:
                oldest = row.version_span.oldest
                assert policy.version.number - oldest.number <= MAX_STALENESS, "invariant 6"
                assert policy.descends_from(oldest), "its weights survive"

    @rule(model=st.sampled_from(MODELS), how=st.sampled_from(("train", "train", "train", "drop")))
    def settle(self, model, how):
        policy = self.policies[model]
        if policy.batch is None:
            return
        batch_id = policy.batch.batch_id
        if how == "train":
            rows = {row.trajectory_id for group in policy.batch.groups for row in group.trajectories}
            after = policy.train(rows)
            self.do(self.ingestor.mark_consumed(model, batch_id, after.number, after.incarnation))
        else:
            self.do(self.ingestor.drop(model, batch_id, "non_finite"))
        policy.batch = None

    @rule(model=st.sampled_from(MODELS))
    def save(self, model):
        policy = self.policies[model]
        if policy.version.number > 0 and policy.version not in policy.saved:
            self.do(self.ingestor.add_checkpoint(model, *policy.version, "digest", "path"))
            policy.saved.append(policy.version)

    @rule(data=st.data(), model=st.sampled_from(MODELS), seldom=st.integers(0, 2))
    def the_trainer_dies(self, data, model, seldom):
        """It starts again at one of its checkpoints, or afresh."""
        policy = self.policies[model]
        if not policy.retired and seldom == 0:
            self._start(model, data.draw(st.sampled_from(policy.starts)))

    @rule(model=st.sampled_from(MODELS), seldom=st.integers(0, 9))
    def retire(self, model, seldom):
        if seldom == 0 and self.policies[model].batch is None:
            self.do(self.ingestor.retire(model))
            self.policies[model].retired = True

    @rule(data=st.data(), seldom=st.integers(0, 3))
    def the_ingest_process_dies(self, data, seldom):
        """Its memory is gone; all trainers start again, since their calls failed."""
        if seldom:
            return
        old = self.ingestor
        self.ingestor = self._open()
        self.do(old.close())
        for model, policy in self.policies.items():
            self._start(model, data.draw(st.sampled_from(policy.starts)))
            if policy.retired:
                self.do(self.ingestor.retire(model))

    def _start(self, model, at):
        restored = None if at is None else tuple(at)
        incarnation = self.do(self.ingestor.register_policy(model, spec_of(model), True, restored=restored))
        self.policies[model].start(incarnation, at)

    @precondition(lambda self: self.group_rows)
    @rule(data=st.data(), seldom=st.integers(0, 2))
    def the_disk_damages_a_row(self, data, seldom):
        rows = sorted(row for group in self.group_rows.values() for row in group)
        if seldom or not rows:
            return
        row = data.draw(st.sampled_from(rows))
        disk = sqlite3.connect(self.path)
        with disk:
            disk.execute(
                "UPDATE payloads SET body = zeroblob(length(body)) WHERE row_id IN "
                "(SELECT id FROM rows WHERE trajectory_id = ?)",
                (row,),
            )
        disk.close()
        self.damaged.add(row)

    @rule()
    def prune(self):
        self.do(self.ingestor.prune())
        for policy in self.policies.values():
            policy.pruned = True
            policy.pruned_behind_a_checkpoint |= bool(policy.saved)

    @rule(data=st.data(), model=st.sampled_from(MODELS))
    def remove_a_checkpoint(self, data, model):
        policy = self.policies[model]
        if len(policy.saved) > 1:
            gone = data.draw(st.sampled_from(policy.saved[:-1]))
            self.do(self.ingestor.remove_checkpoint(model, *gone))
            policy.saved.remove(gone)

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def every_row_is_accounted_for(self):
        """Invariant 3, in memory and on disk, against the rows that were sent."""
        stats = self.do(self.ingestor.stats())
        counts = {
            (model, fate): n
            for model, fate, n in self._read(
                "SELECT model_id, fate, sum(n) FROM (SELECT model_id, fate, 1 AS n FROM rows "
                "UNION ALL SELECT model_id, fate, rows FROM pruned) GROUP BY 1, 2"
            )
        }
        replayed = dict(
            self._read(
                "SELECT model_id, sum(n) FROM (SELECT model_id, 1 AS n FROM replays "
                "UNION ALL SELECT model_id, uses FROM pruned_replays) GROUP BY 1"
            )
        )
        for model, mine in stats.items():
            uses = self.policies[model].uses
            assert mine["unaccounted"] == 0
            assert mine["replayed"] == replayed.get(model, 0) == uses.total() - len(uses)
            assert mine["accepted"] == self.accepted[model]
            assert mine["trained"] == counts.get((model, "trained"), 0) == len(uses)
            for fate, rows in (("trained", len(uses)), ("stale", mine["dropped"].get("stale", 0))):
                assert sum(each[fate] for each in mine["by_turns"].values()) == rows
            waiting = mine["open"] + mine["queued"] + mine["taken"]
            assert waiting == counts.get((model, None), 0)
            for reason in DROP_REASONS:
                if mine["dropped"].get(reason):
                    event(f"{reason} rows")
                assert mine["dropped"].get(reason, 0) == counts.get((model, reason), 0)

    @invariant()
    def every_workflow_has_one_terminal_record_at_most(self):
        """Invariant 4."""
        terminal = "status IS NOT NULL AND status != 'superseded'"
        found = dict(self._read(f"SELECT workflow_id, status FROM workflows WHERE {terminal}"))
        sent = {each.workflow_id: each.status for each in self.ended.values()}
        assert found.items() <= sent.items()
        ((pruned,),) = self._read(f"SELECT coalesce(sum(workflows), 0) FROM pruned_workflows WHERE {terminal}")
        assert len(found) + pruned == len(sent)

    def _read(self, query):
        disk = sqlite3.connect(self.path)
        try:
            return disk.execute(query).fetchall()
        finally:
            disk.close()


async def _the_rest():
    """What cancelled calls left under way: until it is over, the disk may be a step ahead of the memory."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


DataPath.TestCase.settings = settings(
    max_examples=20, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_interleaving_keeps_the_books = pytest.mark.slow(DataPath.TestCase)
