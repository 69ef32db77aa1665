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
"""Images of rows in the ledger: each is stored once, however many rows show it.

An agent sends its images with every turn and every sample of a task, so rows hold digests and share the bytes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .database import chunks, marks
from .digest import image_digest


class Connection(Protocol):
    """The ledger's database, or a read-only connection to it."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Iterable[Any]: ...


def store(db: Connection, rows: Iterable[tuple[int, Sequence[bytes]]]) -> None:
    """Write the images of new rows, within the caller's transaction."""
    for row_id, images in rows:
        for position, data in enumerate(images):
            digest = image_digest(data)
            db.execute("INSERT INTO images VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, data))
            db.execute("INSERT INTO row_images VALUES (?, ?, ?)", (row_id, position, digest))


def read(db: Connection, row_ids: Sequence[int]) -> dict[int, tuple[bytes | None, ...]]:
    """Images by row, in their order; rows without any are left out. Equal images are one object.

    ``None`` stands for an image that is gone, or not what was written.
    """
    digests: dict[int, list[bytes]] = {}
    for some in chunks(row_ids):
        query = f"SELECT row_id, digest FROM row_images WHERE row_id IN ({marks(some)}) ORDER BY row_id, position"
        for row_id, digest in db.execute(query, some):
            digests.setdefault(row_id, []).append(digest)
    data: dict[bytes, bytes] = {}
    for some in chunks(sorted({digest for of_row in digests.values() for digest in of_row})):
        data.update(db.execute(f"SELECT digest, data FROM images WHERE digest IN ({marks(some)})", some))
    sound = {digest: blob for digest, blob in data.items() if image_digest(blob) == digest}
    return {row_id: tuple(map(sound.get, of_row)) for row_id, of_row in digests.items()}


def forget(db: Connection, row_ids: Sequence[int]) -> None:
    """Delete what only these rows show, within the caller's transaction; at most a chunk of rows."""
    found = db.execute(f"SELECT DISTINCT digest FROM row_images WHERE row_id IN ({marks(row_ids)})", row_ids)
    digests = [digest for (digest,) in found]
    db.execute(f"DELETE FROM row_images WHERE row_id IN ({marks(row_ids)})", row_ids)
    for some in chunks(digests):
        db.execute(
            f"DELETE FROM images WHERE digest IN ({marks(some)}) "
            "AND NOT EXISTS (SELECT 1 FROM row_images WHERE row_images.digest = images.digest)",
            some,
        )
