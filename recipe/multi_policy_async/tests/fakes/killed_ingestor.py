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
"""Processes that drive an ingestor and kill themselves, as an out-of-memory kill would, before a chosen SQL statement.

    python -m recipe.multi_policy_async.tests.fakes.killed_ingestor FOLDER OPERATION

One process per statement, forked after the imports, with a ledger of its own in ``FOLDER/<statement>``; the last one is
the first that was not killed. A JSON line for each: statement, what was acknowledged, whether it was killed.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from recipe.multi_policy_async.tests.fakes.workflow_records import (
    PLANNER,
    SOLVER,
    finish_task,
    ingest_spec,
    queue_spec,
    record,
    trajectory,
)
from recipe.multi_policy_async.trajectory import Version
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor


async def run(path: Path, operation: str, statement: int, acknowledged: Callable[[str], None]) -> None:
    ingestor = TrajectoryIngestor(path, ingest_spec())
    if operation == "restore":
        await restore(ingestor, statement, acknowledged)
        return
    for model_id in (PLANNER, SOLVER):
        await ingestor.register_policy(model_id, queue_spec(max_queue_groups=2), True)
    for task in range(2):
        await finish_task(ingestor, task, models=(PLANNER, SOLVER))
    await ingestor.issue("e0-t2-s0-a0", 2)
    await ingestor.issue("e0-t2-s1-a0", 2)
    await ingestor.ingest(record("e0-t2-s0-a0", trajectory("e0-t2-s0-a0")))
    batch = None
    if operation in ("consume", "prune"):
        batch = await ingestor.take(PLANNER, 1, Version(0, 0), 1)
    kill_at(ingestor, statement)
    if operation == "ingest":  # closes the task: a solver group is too small, the planner's queue too long
        rows = trajectory("e0-t2-s1-a0"), trajectory("e0-t2-s1-a0", model=SOLVER)
        await ingestor.ingest(record("e0-t2-s1-a0", *rows))
    elif operation == "consume":
        await ingestor.mark_consumed(PLANNER, batch.batch_id, 1, 0)
    elif operation == "retire":
        await ingestor.retire(SOLVER)
    elif operation == "register":
        await ingestor.register_policy(PLANNER, queue_spec(max_queue_groups=2), True)
    elif operation == "prune":
        await ingestor.drop(PLANNER, batch.batch_id, "non_finite")
        acknowledged("drop")
        await ingestor.prune()
    acknowledged(operation)


async def train(ingestor: TrajectoryIngestor, model_id: str, groups: int, version: Version) -> None:
    batch = await ingestor.take(model_id, groups, version, 1)
    await ingestor.mark_consumed(model_id, batch.batch_id, version.number + 1, version.incarnation)


async def restore(ingestor: TrajectoryIngestor, statement: int, acknowledged: Callable[[str], None]) -> None:
    """The planner made three steps, was saved after the first, is restored there, trains and is saved once more.

    Task 0 is trained by the first step, of both policies; task 1 by the second, which is lost, and so is the third,
    with task 2 sampled by its predecessor. Task 3 was sampled by the saved weights and waits; task 4 is in play.
    """
    for model_id in (PLANNER, SOLVER):
        await ingestor.register_policy(model_id, queue_spec(), True)
    await finish_task(ingestor, 0, models=(PLANNER, SOLVER))
    for model_id in (PLANNER, SOLVER):
        await train(ingestor, model_id, 1, Version(0, 0))
        await ingestor.add_checkpoint(model_id, 0, 1, "digest", "path")
    for task, sampled_by in ((1, 1), (2, 2)):
        await finish_task(ingestor, task, version=sampled_by)
        await train(ingestor, PLANNER, 1, Version(0, task))
    await finish_task(ingestor, 3, version=1)
    for sample in range(2):
        await ingestor.issue(f"e0-t4-s{sample}-a0", 2)
    await ingestor.ingest(record("e0-t4-s0-a0", trajectory("e0-t4-s0-a0", version=1)))
    kill_at(ingestor, statement)
    incarnation = await ingestor.register_policy(PLANNER, queue_spec(), True, restored=(0, 1))
    acknowledged("restored")
    await train(ingestor, PLANNER, 1, Version(incarnation, 1))
    acknowledged("trained")
    await ingestor.add_checkpoint(PLANNER, incarnation, 2, "digest", "path")
    acknowledged("saved")


def kill_at(ingestor: TrajectoryIngestor, statement: int) -> None:
    """SIGKILL before the ``statement``-th SQL statement from now on, COMMIT included."""
    left = statement

    def before(sql: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    ingestor._state.ledger._db._db.set_trace_callback(before)


def crash(path: Path, operation: str, statement: int) -> tuple[list[str], bool]:
    """What was acknowledged, and whether the process was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        asyncio.run(run(path, operation, statement, lambda what: os.write(write, what.encode() + b"\n")))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        seen = pipe.read().split()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the run failed with status {status}"
    return seen, os.WIFSIGNALED(status)


def main(folder: Path, operation: str) -> None:
    for statement in range(1000):
        seen, killed = crash(folder / str(statement) / "ledger.sqlite", operation, statement)
        print(json.dumps([statement, seen, killed]), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
