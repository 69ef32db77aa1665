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
"""When a policy is saved, which saves count, and which are deleted.

Each policy saves on its own at its own version boundaries; nobody else stops for it. A save counts once its row
(model, incarnation, step, digest) is in the ledger, which happens after verl's files are on disk; the manifest is a
view of these rows. Only the coordinator deletes, and the row goes before the files.

    checkpoints/manifest.json
    checkpoints/<model_id>/incarnation_<n>/global_step_<version>/     verl's files, written once
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .configuration.schema import CheckpointSpec
from .ingest.handle import call
from .trajectory import Version

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of one policy on disk."""

    model_id: str
    incarnation: int
    step: int
    path: str  # relative to the run directory, which may be moved
    digest: str  # of the files' names and contents


class CheckpointSchedule:
    """Decides, for one policy, at which versions to save and where.

    Args:
        spec: how often.
        run_dir: the job's directory.
        model_id: the policy.
    """

    def __init__(self, spec: CheckpointSpec, run_dir: Path, model_id: str):
        self._spec = spec
        self._run_dir = run_dir
        self._model_id = model_id

    def folder(self, incarnation: int) -> Path:
        """verl's ``trainer.default_local_dir`` for this incarnation, which is written once."""
        return self._run_dir / FOLDER / self._model_id / f"incarnation_{incarnation}"

    def is_due(self, version: Version, *, last: bool) -> bool:
        every = self._spec.every_updates
        return version.number > 0 and ((every > 0 and version.number % every == 0) or (last and self._spec.at_end))

    def describe(self, version: Version) -> SavedCheckpoint:
        """Read the files of ``version`` back and digest them.

        Raises:
            FileNotFoundError: there are none.
        """
        folder = self.folder(version.incarnation) / f"global_step_{version.number}"
        path = str(folder.relative_to(self._run_dir))
        return SavedCheckpoint(self._model_id, *version, path, folder_digest(folder))


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of all files below ``folder``.

    Raises:
        FileNotFoundError: the folder has no file.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"checkpoint {folder} has no files")
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def damage_of(saved: SavedCheckpoint, run_dir: Path) -> str | None:
    """What is wrong with a checkpoint's files; ``None``: nothing."""
    try:
        found = folder_digest(run_dir / saved.path)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if found == saved.digest else "is damaged: its files differ from the digest"


class CheckpointCoordinator:
    """Commits saves to the ledger, keeps the manifest beside them, and deletes what is not kept.

    Args:
        ingestor: the trajectory ingestor, which owns the ledger, or its actor handle.
        run_dir: the job's directory.
        keep: newest checkpoints of a policy that are kept; ``None``: all.
    """

    def __init__(self, ingestor: Any, run_dir: Path, *, keep: int | None):
        self._ingestor = ingestor
        self._run_dir = run_dir
        self._keep = keep
        self._one_change_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Write the manifest, before there is a checkpoint: from then on it says to which ledger they belong."""
        async with self._one_change_at_a_time:
            await self._write_manifest()

    async def commit(self, saved: SavedCheckpoint) -> None:
        """Make a save count, and delete the policy's oldest ones beyond ``keep``."""
        async with self._one_change_at_a_time:
            row = (saved.model_id, saved.incarnation, saved.step, saved.digest, saved.path)
            await call(self._ingestor, "add_checkpoint", *row)
            old = [] if self._keep is None else (await self._of(saved.model_id))[: -self._keep]
            for each in old:
                await call(self._ingestor, "remove_checkpoint", each.model_id, each.incarnation, each.step)
            await self._write_manifest()
        for each in old:
            await asyncio.to_thread(_delete, self._run_dir / each.path)

    async def newest(self, model_id: str) -> SavedCheckpoint | None:
        """The checkpoint at which a policy would start again; ``None``: its initial weights."""
        found = await self._of(model_id)
        return found[-1] if found else None

    async def damage(self, saved: SavedCheckpoint) -> str | None:
        """See ``damage_of``."""
        return await asyncio.to_thread(damage_of, saved, self._run_dir)

    async def sweep(self, model_id: str) -> None:
        """Delete the policy's files that no row of the ledger names: half-written saves and those of a branch that was
        left. Nobody may save for this policy meanwhile."""
        async with self._one_change_at_a_time:
            kept = {self._run_dir / each.path for each in await self._of(model_id)}
            await self._write_manifest()
        incarnations = (self._run_dir / FOLDER / model_id).glob("incarnation_*")
        for folder in incarnations:
            steps = set(folder.glob("global_step_*"))
            for gone in steps - kept if steps & kept else {folder}:
                await asyncio.to_thread(_delete, gone)

    async def _of(self, model_id: str) -> list[SavedCheckpoint]:
        return [each for each in await self._all() if each.model_id == model_id]

    async def _all(self) -> list[SavedCheckpoint]:
        return [SavedCheckpoint(*columns) for columns in await call(self._ingestor, "checkpoints")]

    async def _write_manifest(self) -> None:
        manifest = {
            "ledger_id": await call(self._ingestor, "ledger_id"),
            "checkpoints": [asdict(each) for each in await self._all()],
        }
        folder = self._run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{MANIFEST}"
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(temporary, folder / MANIFEST)


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError:
        # The ledger does not count it any more; the next start of this policy sweeps it away.
        logger.warning("checkpoint %s could not be deleted", folder, exc_info=True)
