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
"""A run directory belongs to one run, and one process at a time works in it."""

import os
import subprocess
import sys
import threading

import pytest
import yaml

from ..configuration.errors import ConfigError
from ..run_directory import claim, goes_on, wait_for_lock, write_config


@pytest.fixture
def job(plain_job, tmp_path):
    """Builds the job with other ``run`` settings, its directory below ``tmp_path``."""

    def build(**run):
        changed = plain_job.run.model_copy(update={"dir": tmp_path / "run", **run})
        return plain_job.model_copy(update={"run": changed})

    return build


def start(job) -> None:
    """What a job leaves in its directory when it ends at once."""
    with claim(job):
        write_config(job)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_without_a_run_there_a_job_starts(job, resume):
    assert goes_on(job(resume=resume)) is False


@pytest.mark.parametrize("resume", [True, "auto"])
def test_with_a_run_there_a_job_goes_on_if_it_may(job, resume):
    start(job())
    assert goes_on(job(resume=resume)) is True


def test_a_run_is_not_touched_by_a_job_that_does_not_say_so(job):
    start(job())
    with pytest.raises(ConfigError, match="holds another run(.|\n)*run.resume=true"):
        goes_on(job())


def test_there_must_be_a_run_to_go_on_with(job):
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        goes_on(job(resume=True))


def test_a_new_run_has_no_version_to_go_on_from(job):
    with pytest.raises(ConfigError, match="resume_at(.|\n)*run.resume=true"):
        goes_on(job(resume_at={"planner_model": 4}))
    assert goes_on(job(resume="auto", resume_at={"planner_model": 4})) is False


def test_two_jobs_cannot_work_in_one_directory(job):
    with claim(job()), pytest.raises(ConfigError, match="in use by a running job"), claim(job(resume="auto")):
        pass


def test_of_two_jobs_that_start_at_once_one_gets_the_directory_also_when_it_is_done_first(job):
    assert goes_on(job()) is False
    start(job())
    with pytest.raises(ConfigError, match="holds another run"), claim(job()):
        pass
    with claim(job(resume=True)):
        pass  # the refused one let go of it


def test_what_the_run_did_before_is_kept_beside_what_it_does_now(job, tmp_path):
    start(job())
    with claim(job(resume=True)):
        write_config(job(resume=True, name="later"))
        write_config(job(resume=True, name="last"))
    config = tmp_path / "run" / "config"
    names = [
        yaml.safe_load((folder / "job.yaml").read_text())["run"]["name"]
        for folder in (config / "before_resume_1", config / "before_resume_2", config)
    ]
    assert names == ["planner_solver_tiny", "later", "last"]


def test_the_ledger_waits_for_a_killed_process_to_let_go(tmp_path):
    hold = "import filelock as f, sys; lock = f.FileLock(sys.argv[1]); lock.acquire(); print('held'); sys.stdin.read()"
    path = tmp_path / "ledger.lock"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match="held by another process"):
            wait_for_lock(path, 0.01)
        threading.Timer(0.05, lambda: os.kill(other.pid, 9)).start()
        assert wait_for_lock(path, 60).is_locked
