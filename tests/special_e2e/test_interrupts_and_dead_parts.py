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
"""Ctrl-C and dead parts: the job ends as it says, and leaves no process and no port behind."""

import re
import signal
import sqlite3

import pytest

pytestmark = pytest.mark.e2e

EXIT_INTERRUPTED, EXIT_FAILED = 130, 1
TRAINED = r"solver_model\s+version\s+2 "


def test_the_first_interrupt_drains_and_nothing_is_left(start_job):
    job = start_job("stop.updates=1000", "checkpoint.at_end=true")
    job.wait_for_line(TRAINED)
    job.interrupt()
    job.wait_for_line("draining")
    assert job.wait(timeout_s=180) == EXIT_INTERRUPTED
    ended = dict(re.findall(r"(\w+_model) ended at version (\d+)", "\n".join(job.lines)))
    with sqlite3.connect(job.run_dir / "ledger.sqlite") as ledger:
        saved = dict(ledger.execute("SELECT model_id, max(step) FROM checkpoints GROUP BY 1"))
    assert len(saved) == 2
    assert saved == {model_id: int(version) for model_id, version in ended.items()}, "training closed its versions"
    assert job.left_behind() == []


def test_the_second_interrupt_ends_at_once_and_nothing_is_left(start_job):
    job = start_job("stop.updates=1000")
    job.wait_for_line(TRAINED)
    job.interrupt()
    job.wait_for_line("draining")
    job.interrupt()
    assert job.wait(timeout_s=60) == EXIT_INTERRUPTED
    assert job.left_behind() == []


@pytest.mark.parametrize(
    ("process", "named"),
    [
        ("ray::WorkerDict", r"FAILED: (planner|solver)_model: "),
        ("ray::HFRolloutWorker", r"FAILED: (planner|solver)_model: "),
        ("ray::GatewayActor", r"FAILED: gateway: "),
        ("ray::IngestorActor", r"FAILED: (ingestor|workflow driver|(planner|solver)_model: trainer): "),
    ],
)
def test_a_killed_part_ends_the_job_and_is_named(start_job, process, named):
    """Invariant 8. The control without a fault is the co-training test beside this one: it ends with exit 0."""
    job = start_job("stop.updates=1000")
    job.wait_for_line(TRAINED)
    victim = next(each for each in job.processes() if each.name().startswith("ray::") and process in each.cmdline()[0])
    victim.send_signal(signal.SIGKILL)
    job.wait_for_line(named)
    assert job.wait(timeout_s=60) == EXIT_FAILED
    assert job.left_behind() == []
