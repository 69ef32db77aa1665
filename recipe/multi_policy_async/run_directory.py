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
"""A job's directory: it belongs to one run, and one process at a time works in it.

| `run.resume` | the directory holds no run | it holds one |
|---|---|---|
| `false` | start | refused |
| `true` | refused | go on |
| `auto` | start | go on |
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .configuration.errors import ConfigError, Problem
from .configuration.explain import write_resolved
from .configuration.schema import JobSpec

CONFIG = "config"
DATA_FILE = "data.json"
LOCK_FILE = ".lock"


def goes_on(job: JobSpec) -> bool:
    """Whether the job goes on with the run that its directory holds, instead of starting one.

    Raises:
        ConfigError: it holds one and must not, or must and does not.
    """
    holds_a_run = (job.run.dir / CONFIG / "job.yaml").exists()
    problems = []
    if job.run.resume is False and job.run.resume_at:
        problems.append(
            Problem("run.resume_at", "means nothing to a new run", job.run.resume_at, fix="run.resume=true")
        )
    if holds_a_run and job.run.resume is False:
        fix = "name a new folder, or run.resume=true to go on with it"
        problems.append(Problem("run.dir", "holds another run", str(job.run.dir), fix=fix))
    if not holds_a_run and job.run.resume is True:
        problems.append(Problem("run.dir", "holds no run to go on with", str(job.run.dir), fix="run.resume=false"))
    if problems:
        raise ConfigError(problems)
    return holds_a_run


@contextmanager
def claim(job: JobSpec) -> Iterator[None]:
    """Make the directory and hold it; a process that dies, however it does, lets go of it.

    Raises:
        ConfigError: another process works in it, or it holds a run meanwhile.
    """
    job.run.dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(job.run.dir / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        problem = Problem("run.dir", "is in use by a running job", str(job.run.dir), fix="wait until it has ended")
        raise ConfigError([problem]) from None
    try:
        goes_on(job)  # of two jobs that start at once the second may come when the first has ended
        yield
    finally:
        lock.release()


def write_config(job: JobSpec) -> None:
    """Write what the job does below ``config``; of a run that goes on, the former files are kept beside it."""
    folder = job.run.dir / CONFIG
    former = [path for path in folder.glob("*") if path.is_file()]
    if former:
        kept = folder / f"before_resume_{sum(path.is_dir() for path in folder.iterdir()) + 1}"
        kept.mkdir()
        for path in former:
            shutil.copy2(path, kept)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_FILE).write_text(json.dumps(data_digests(job), indent=1) + "\n")
    write_resolved(job)


def data_digests(job: JobSpec) -> dict[str, Any]:
    """SHA-256 of the training files, in their order: what task numbers in the ledger refer to."""
    found = {}
    for path in job.data.train_files:
        with path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def wait_for_lock(path: Path, timeout_s: float) -> FileLock:
    """Hold ``path`` for as long as the returned lock lives; a process that was killed lets go of it at once.

    Raises:
        TimeoutError: another process holds it for ``timeout_s``.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        raise TimeoutError(f"{path} is held by another process for more than {timeout_s:g} s") from None
    return lock
