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
"""What a finished job did, read from its run directory, in the words of the simulator.

The time that is measured begins when every policy has made its first ``skip`` versions and ends when the first policy
has reached its target: starting is left out, and so is what is different once a policy has retired.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from recipe.multi_policy_async.ingest.reasons import RECORDED, RETIRED, SHUTDOWN, TRAINED
from recipe.multi_policy_async.simulator.measured import BY_RULE, ENOUGH, Flow, PolicyRun
from recipe.multi_policy_async.simulator.meters import Window

CORES = "cores"
CPU_FILE = "cpu.jsonl"

STAGE_OF_PROCESS = {  # by the names of benchmarks/footprint.py
    "ray::WorkerDict": "training",
    "ray::ModelAsyncRuntime": "training",
    "ray::HFRolloutWorker": "serving",
    "sglang::router": "serving",
    "ray::GatewayActor": "gateway",
    "ray::IngestorActor": "ingestor",
    "ray::WorkflowDriverActor": "workflow driver",
}
OTHERS = "others"

NOT_LOST = (None, TRAINED, RECORDED, RETIRED, SHUTDOWN)  # the last two: what waits when the job ends

Record = dict[str, Any]


@dataclass(frozen=True)
class JobRun(Flow):
    """One job. ``cpu`` is the mean number of cores in use, by stage; ``machine`` that of the whole machine."""

    seconds_per_version: Mapping[str, float]
    cores: int
    cpu: Mapping[str, float]
    machine: float

    @property
    def cores_busy(self) -> float:
        """Share of the machine's cores that this job used."""
        return sum(self.cpu.values()) / self.cores

    @property
    def workflow_bounds(self) -> dict[str, float]:
        """As in a simulation, with one more: what the cores would allow if they did nothing else."""
        bounds = super().workflow_bounds
        if self.cores_busy:
            bounds[CORES] = self.workflow_rate / self.cores_busy
        return bounds

    @property
    def disturbance(self) -> float:
        """Cores that other programs used."""
        return max(0.0, self.machine - self.cores_busy * self.cores)

    @property
    def bound_by_cores(self) -> bool:
        """Whether the machine has no core left, this job's work or another's."""
        return self.machine >= ENOUGH * self.cores


def measure(run_dir: Path, skip: int) -> JobRun:
    """Read one run.

    Args:
        run_dir: of a job that has ended, with ``cpu.jsonl``, and whose ledger was not pruned.
        skip: first versions of each policy that do not count.

    Raises:
        ValueError: too few versions of a policy lie in the time that is measured.
    """
    job = yaml.safe_load((run_dir / "config" / "job.yaml").read_text())
    trained = [model_id for model_id, policy in job["models"].items() if policy["train"]]
    metrics = run_dir / "metrics"
    steps = {
        model_id: [step for step in read_lines(metrics / "steps.jsonl") if step["model_id"] == model_id]
        for model_id in trained
    }
    window = measured_window(steps, skip)
    samples = [sample for sample in read_lines(metrics / "pipeline.jsonl") if sample["time"] in window]
    ledger = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        workflows = ledger.execute(
            "SELECT issued_at, ended_at FROM workflows WHERE status IS NOT 'superseded'"
        ).fetchall()
        rows = ledger.execute(
            "SELECT model_id, fate, ended_at FROM rows JOIN workflows USING (workflow_id) WHERE ended_at IS NOT NULL"
        ).fetchall()
    finally:
        ledger.close()
    policies = {
        model_id: measure_policy(
            steps[model_id] if model_id in steps else None,
            sync_seconds(metrics / f"{model_id}.jsonl", model_id),
            [sample["models"][model_id] for sample in samples],
            Counter(fate for model, fate, ended_at in rows if model == model_id and ended_at in window),
            serving_slots(run_dir, model_id, policy),
            window,
        )
        for model_id, policy in job["models"].items()
    }
    return JobRun(
        seconds=window.seconds,
        policies=policies,
        workflow_rate=sum(ended_at is not None and ended_at in window for _, ended_at in workflows) / window.seconds,
        slots=job["workflow"]["max_concurrent"],
        slots_in_use=sum(window.overlap(begin, end or window.end) for begin, end in workflows) / window.seconds,
        admission=job["ingest"]["admission"],
        seconds_per_version={model_id: seconds_per_version(own, window) for model_id, own in steps.items()},
        **measure_cores(read_lines(run_dir / CPU_FILE), window),
    )


def measured_window(steps: Mapping[str, Sequence[Record]], skip: int) -> Window:
    """See above.

    Raises:
        ValueError: a policy has fewer than two versions in it.
    """
    if not all(len(own) > skip for own in steps.values()):
        raise ValueError(f"a policy has no more than {skip} versions: { ({m: len(own) for m, own in steps.items()}) }")
    window = Window(
        max(own[skip - 1]["time"] for own in steps.values()), min(own[-1]["time"] for own in steps.values())
    )
    for model_id, own in steps.items():
        if len(ends_in(own, window)) < 2:
            raise ValueError(f"{model_id} made fewer than two versions while every policy trained")
    return window


def ends_in(steps: Sequence[Record], window: Window) -> list[Record]:
    """The steps that end in the window, its own ends included."""
    return [step for step in steps if window.begin <= step["time"] <= window.end]


def seconds_per_version(steps: Sequence[Record], window: Window) -> float:
    """From the end of the first step in the window to the end of the last one."""
    own = ends_in(steps, window)
    return (own[-1]["time"] - own[0]["time"]) / (own[-1]["version"] - own[0]["version"])


def measure_policy(
    steps: Sequence[Record] | None,
    sync_s: Mapping[int, float],
    samples: Sequence[Record],
    fates: Mapping[str | None, int],
    slots: int,
    window: Window,
) -> PolicyRun:
    """One policy.

    Args:
        steps: its lines of ``steps.jsonl``; ``None`` for a frozen policy.
        sync_s: seconds of the weight sync, by version.
        samples: its part of the pipeline lines in the window.
        fates: what became of the rows whose workflows ended in the window; ``None``: they wait.
        slots: sequences that its servers decode at once.
        window: what is measured.
    """
    shares = phases(steps or (), sync_s, window)
    own = ends_in(steps or (), window)
    rows = sum(step["rows"] for step in own[1:])
    weights = sum(step["rows"] for step in own)
    return PolicyRun(
        trained=steps is not None,
        serving_busy=mean(sample["running"] for sample in samples) / slots,
        serving_queue=mean(sample["waiting_for_slot"] for sample in samples),
        gate_closed=shares["sync"],
        call_rate=sum(fates.values()) / window.seconds,  # agents make one call per row here
        queue_groups=mean(sample["queue_groups"] for sample in samples),
        phases=shares if steps is not None else {},
        trainable_rate=sum(count for fate, count in fates.items() if fate not in BY_RULE) / window.seconds,
        trained_rate=rows / (own[-1]["time"] - own[0]["time"]) if rows else 0.0,
        dropped={fate: count for fate, count in fates.items() if fate not in NOT_LOST},
        staleness_mean=sum(step["staleness_mean"] * step["rows"] for step in own) / weights if weights else 0.0,
        staleness_max=max((step["staleness_max"] for step in own), default=0),
        version=str(own[-1]["version"]) if own else "0",
    )


def phases(steps: Sequence[Record], sync_s: Mapping[int, float], window: Window) -> dict[str, float]:
    """Shares of the window that the trainer waited for data (held for older groups, too), trained and synced weights.

    A step's report comes at its end and says how long it took since it had its batch; its sync comes last.
    """
    seconds = dict.fromkeys(("wait", "train", "hold", "sync"), 0.0)
    for before, step in pairwise(steps):
        end = step["time"]
        begin, sync = end - step["train_seconds"], end - sync_s[step["version"]]
        seconds["wait"] += window.overlap(before["time"], begin)
        seconds["train"] += window.overlap(begin, sync)
        seconds["sync"] += window.overlap(sync, end)
    return {phase: spent / window.seconds for phase, spent in seconds.items()}


def sync_seconds(file: Path, model_id: str) -> dict[int, float]:
    """Seconds of each version's weight sync, of a policy with a sync in every step; empty for a frozen one."""
    key = f"{model_id}/timing_s/timing_s/param_sync"  # as verl spells it
    return {line["step"]: line["data"][key] for line in read_lines(file) if key in line["data"]}


def serving_slots(run_dir: Path, model_id: str, policy: Record) -> int:
    """Sequences that all replicas of a policy decode at once."""
    verl = yaml.safe_load((run_dir / "config" / f"{model_id}.yaml").read_text())
    replicas = policy["rollout_gpus"] // policy["gpus_per_replica"]
    return verl["actor_rollout_ref"]["rollout"]["max_num_seqs"] * replicas


def measure_cores(readings: Sequence[Record], window: Window) -> Record:
    """Cores in use between the readings that lie closest to the window's ends, as keywords of ``JobRun``."""
    first, last = (min(readings, key=lambda each: abs(each["time"] - end)) for end in (window.begin, window.end))
    seconds = last["time"] - first["time"]
    cpu: Counter[str] = Counter()
    for name, spent in last["by_process"].items():
        cpu[STAGE_OF_PROCESS.get(name, OTHERS)] += (spent - first["by_process"].get(name, 0.0)) / seconds
    return {"cores": last["cores"], "cpu": dict(cpu), "machine": (last["machine"] - first["machine"]) / seconds}


def read_lines(file: Path) -> list[Record]:
    """A file of JSON lines; of none: nothing."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def mean(values: Any) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
