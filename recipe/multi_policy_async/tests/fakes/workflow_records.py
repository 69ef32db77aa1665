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
"""Small, valid trajectories and workflow records, and the specs that tests vary."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from recipe.multi_policy_async.clock import now
from recipe.multi_policy_async.ingest.ledger_report import open_ledger, workflow_counts
from recipe.multi_policy_async.ingest.ledger_schema import SUPERSEDED
from recipe.multi_policy_async.ingest.spec import IngestSpec, QueueSpec
from recipe.multi_policy_async.trajectory import Trajectory, WorkflowRecord
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor

PLANNER, SOLVER = "planner_model", "solver_model"


def ingest_spec(**changes: Any) -> IngestSpec:
    values = {
        "synchronous": "normal",
        "admission": "any",
        "schedule": "all",
        "alternate_versions": 1,
        "on_failed": "drop",
        "on_truncated": "keep",
        "max_give_backs": 2,
        "prune_every_s": 60.0,
        "stagger": {"max_wait_s": 0.0},
        "poll_s": 0.2,
    }
    return IngestSpec(**(values | changes))


def queue_spec(**changes: Any) -> QueueSpec:
    values = {
        "max_lead_groups": 8,
        "max_queue_groups": None,
        "max_staleness": None,
        "on_stale": "drop",
        "start_after_tasks": 0,
        "idle_tasks_limit": None,
        "min_group_size": 2,
        "on_small_group": "drop",
        "ema_decay": 0.98,
        "filter_equal_rewards": False,
        "group_by": "task_agent",
        "min_batch_groups": None,
        "max_batch_groups": None,
        "coalesce_s": 30.0,
        "replay": {"max_uses": 1, "max_age": 4, "max_share": 0.5},
    }
    return QueueSpec(**(values | changes))


def trajectory(workflow_id: str, /, *, model: str = PLANNER, row: int = 0, **changes: Any) -> Trajectory:
    """Two prompt tokens; response: sampled, context, sampled."""
    agent = changes.pop("agent_id", model.removesuffix("_model"))
    version, incarnation = changes.pop("version", 0), changes.pop("incarnation", 0)
    values = {
        "trajectory_id": f"{workflow_id}/{agent}/{row}",
        "workflow_id": workflow_id,
        "agent_id": agent,
        "model_id": model,
        "request_id": f"{workflow_id}-{agent}-{row}",
        "turn": row,
        "prompt_ids": np.array([5, 6], dtype=np.int32),
        "response_ids": np.array([7, 8, 9], dtype=np.int32),
        "response_mask": np.array([1, 0, 1], dtype=np.uint8),
        "log_probs": np.array([-0.25, 0.0, -1.5], dtype=np.float32),
        "versions": np.array([version, -1, version], dtype=np.int32),
        "incarnation": incarnation,
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Trajectory(**(values | changes))


def record(workflow_id: str, *rows: Trajectory, status: str = "ok", **changes: Any) -> WorkflowRecord:
    return WorkflowRecord(workflow_id=workflow_id, status=status, trajectories=rows, **changes)


def has_room(ingestor: TrajectoryIngestor) -> bool:
    """Whether admission would start another task now."""
    return ingestor._state.has_room()


def workflow_stats(ingestor: TrajectoryIngestor) -> dict[str, Any]:
    """Open tasks, workflows in flight, and terminal records by status."""
    state = ingestor._state
    with open_ledger(state.ledger._db.path) as db:
        endings = {each["status"]: each["workflows"] for each in workflow_counts(db)}
    for status in (SUPERSEDED, "in flight"):
        endings.pop(status, None)
    return {"open_tasks": len(state.open), "in_flight": len(state.in_flight), "endings": endings}


async def finish_task(
    ingestor: TrajectoryIngestor, task: int, *, members: int = 2, models: tuple[str, ...] = (PLANNER,), **changes: Any
) -> None:
    """Issue and end all workflows of a task, each with one row per policy."""
    ids = [f"e0-t{task}-s{sample}-a0" for sample in range(members)]
    for workflow_id in ids:
        await ingestor.issue(workflow_id, members)
    for workflow_id in ids:
        rows = (trajectory(workflow_id, model=model, **changes) for model in models)
        await ingestor.ingest(record(workflow_id, *rows))


def loop_time() -> float:
    """For ingestors that wait by the time of the loop, which may be virtual; 0 where none runs yet."""
    try:
        return now()
    except RuntimeError:
        return 0.0


def with_ingestor(path: Path, scenario: Any, *, run: Callable[..., Any] = asyncio.run, **changes: Any) -> Any:
    """Run ``await scenario(ingestor)`` on an ingestor at ``path`` and close it.

    ``run``: ``virtual_time.run`` for scenarios that only wait.
    """

    async def main() -> Any:
        ingestor = TrajectoryIngestor(path / "ledger.sqlite", ingest_spec(**changes), clock=loop_time)
        try:
            running: Awaitable[Any] = scenario(ingestor)
            return await asyncio.wait_for(running, 20)
        finally:
            await ingestor.close()

    return run(main())


async def register_both(ingestor) -> None:
    """The planner and the solver, both trained."""
    for model_id in (PLANNER, SOLVER):
        await ingestor.register_policy(model_id, queue_spec(), True)


async def stats_of(ingestor, model_id: str = PLANNER) -> dict:
    """One policy's stats, its account checked."""
    stats = (await ingestor.stats())[model_id]
    assert stats["unaccounted"] == 0, "invariant 3"
    return stats
