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
"""When a policy is saved, and which saves count.

Each policy saves on its own at its own version boundaries; nobody else stops for it. A save counts once its row
(model, incarnation, step, digest) is in the ledger, which happens after verl's files are on disk; the manifest is a
view of these rows.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .configuration.schema import CheckpointSpec
from .trajectory import Version

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of one policy on disk."""

    model_id: str
    incarnation: int
    step: int
    path: str
    digest: str  # of the files' names and contents


class CheckpointSchedule:
    """Decides, for one policy, at which versions to save.

    Args:
        spec: how often.
        root: folder of this policy's checkpoints; every incarnation has its own below it, written once.
    """

    def __init__(self, spec: CheckpointSpec, root: Path):
        self._spec = spec
        self._root = root

    def folder(self, incarnation: int) -> Path:
        """verl's ``trainer.default_local_dir`` for this incarnation."""
        return self._root / f"incarnation_{incarnation}"

    def is_due(self, version: Version, *, last: bool) -> bool:
        every = self._spec.every_updates
        return version.number > 0 and ((every > 0 and version.number % every == 0) or (last and self._spec.at_end))


def describe_checkpoint(model_id: str, version: Version, folder: Path) -> SavedCheckpoint:
    """Read a checkpoint's files back and digest them.

    Raises:
        FileNotFoundError: the folder has no file.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{model_id}: checkpoint {folder} has no files")
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return SavedCheckpoint(model_id, version.incarnation, version.number, str(folder), digest.hexdigest())


class CheckpointCoordinator:
    """Commits saves to the ledger and keeps the manifest beside them.

    Args:
        ingestor: handle of the ingestor, which owns the ledger.
        root: folder of all policies' checkpoints.
    """

    def __init__(self, ingestor: Any, root: Path):
        self._ingestor = ingestor
        self._root = root
        self._saved: list[SavedCheckpoint] = []

    async def commit(self, saved: SavedCheckpoint) -> None:
        """Make a save count."""
        await self._ingestor.add_checkpoint.remote(
            saved.model_id, saved.incarnation, saved.step, saved.digest, saved.path
        )
        self._saved.append(saved)
        temporary = self._root / f".{MANIFEST}"
        temporary.write_text(json.dumps([asdict(each) for each in self._saved], indent=1) + "\n")
        os.replace(temporary, self._root / MANIFEST)
