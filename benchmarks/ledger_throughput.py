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
"""How much the ingest process sustains: workflows and bytes per second into the ledger, rows per second out of it.

    python benchmarks/ledger_throughput.py [--folder FOLDER]

Two policies, one row each per workflow, 64 finalize calls at a time, each acknowledged after its transaction; then one
policy's groups are taken and consumed in batches of 32. Put the folder on the disk that the run directory will be on.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

import recipe.multi_policy_async.ingest as ingest
from recipe.multi_policy_async.ingest.spec import IngestSpec, QueueSpec
from recipe.multi_policy_async.trajectory import Trajectory, Version, WorkflowRecord
from recipe.multi_policy_async.trajectory_ingestor import TrajectoryIngestor

CONFIG = Path(ingest.__file__).parents[1] / "config"
POLICIES = ("planner_model", "solver_model")
MEMBERS = 8
CONCURRENT = 64
SHAPES = ((100, 4000), (2000, 2000), (16000, 400))  # response tokens per row, workflows


def defaults(group: str) -> dict:
    return yaml.safe_load((CONFIG / group / "default.yaml").read_text())


def row(workflow_id: str, model_id: str, tokens: int, rng: np.random.Generator) -> Trajectory:
    return Trajectory(
        trajectory_id=f"{workflow_id}/{model_id}/0",
        workflow_id=workflow_id,
        agent_id=model_id,
        model_id=model_id,
        request_id=f"{workflow_id}-{model_id}",
        turn=0,
        prompt_ids=np.arange(tokens // 2, dtype=np.int32),
        response_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=np.uint8),
        log_probs=-rng.random(tokens, dtype=np.float32),
        versions=np.full(tokens, 3, dtype=np.int32),
        incarnation=0,
        finish_reason="stop",
        reward=1.0,
    )


async def longest_pause(stop: asyncio.Event) -> float:
    """Longest time that the event loop did not get to us, in seconds."""
    longest = 0.0
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        longest = max(longest, time.perf_counter() - before - 0.005)
    return longest


async def measure(folder: Path, synchronous: str, tokens: int, workflows: int) -> str:
    ingestor = TrajectoryIngestor(
        folder / "ledger.sqlite", IngestSpec(**defaults("ingest") | {"synchronous": synchronous})
    )
    for model_id in POLICIES:
        await ingestor.register_policy(model_id, QueueSpec(**defaults("queue") | {"max_lead_groups": 10**6}), True)
    rng = np.random.default_rng(0)
    records = []
    for n in range(workflows):
        workflow_id = f"e0-t{n // MEMBERS}-s{n % MEMBERS}-a0"
        rows = tuple(row(workflow_id, model_id, tokens, rng) for model_id in POLICIES)
        records.append(WorkflowRecord(workflow_id=workflow_id, status="ok", trajectories=rows, score=1.0))
    slots, latencies, stop = asyncio.Semaphore(CONCURRENT), [], asyncio.Event()

    async def one(record: WorkflowRecord) -> None:
        async with slots:
            await ingestor.issue(record.workflow_id, MEMBERS)
            before = time.perf_counter()
            await ingestor.ingest(record)
            latencies.append(time.perf_counter() - before)

    watching = asyncio.create_task(longest_pause(stop))
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(record) for record in records))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = sum(file.stat().st_size for file in folder.iterdir() if not file.name.endswith(("-wal", "-shm")))

    out, groups = time.perf_counter(), 0
    while groups < workflows // MEMBERS:
        batch = await ingestor.take(POLICIES[0], 32, Version(0, 3), 0.1)
        if batch is None:
            break
        groups += len(batch.groups)
        await ingestor.mark_consumed(POLICIES[0], batch.batch_id, 4, 0)
    out = time.perf_counter() - out
    stop.set()
    pause = await watching
    await ingestor.close()
    rows = workflows * len(POLICIES)
    cells = [
        synchronous,
        str(tokens),
        f"{workflows / wall:.0f}",
        f"{size / wall / 1e6:.1f}",
        f"{1e3 * cpu / workflows:.2f}",
        f"{1e3 * float(np.median(latencies)):.0f}",
        f"{size / rows:.0f}",
        f"{groups * MEMBERS / out:.0f}",
        f"{1e3 * pause:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to put the ledgers; a temporary folder by default")
    options = parser.parse_args()
    columns = "synchronous", "response tokens", "workflows/s", "MB/s", "CPU ms/workflow", "ack ms (median)", "bytes/row"
    print(f"| {' | '.join(columns)} | rows/s out | longest pause ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for tokens, workflows in SHAPES:
        for synchronous in ("normal", "full"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                print(asyncio.run(measure(Path(folder), synchronous, tokens, workflows)), flush=True)


if __name__ == "__main__":
    main()
