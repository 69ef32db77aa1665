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
"""Co-training end to end, as a user starts it: the example's script, nothing faked."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of processes whose environment or command line names the run."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if process.pid != os.getpid() and (
                str(run_dir) in command or process.environ().get("RUN_DIR") == str(run_dir)
            ):
                found.append(command)
        except psutil.Error:
            continue  # it ended, or is not ours to read
    return found


@pytest.mark.e2e
def test_two_policies_co_train_and_leave_nothing_behind(tmp_path):
    run_dir = tmp_path / "run"
    done = subprocess.run(
        ["bash", str(ROOT / "tests/special_e2e/run_multi_policy_cpu.sh")],
        env={**os.environ, "RUN_DIR": str(run_dir), "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert (run_dir / "ledger.sqlite").exists()
    assert processes_of(run_dir) == []
