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
"""Trajectory arrays as compact bytes: about 8 bytes per response token and 4 per prompt token.

Layout, little endian: ``uint32`` CRC-32 of what follows, ``int32[4]`` header (prompt length P, response length R,
version runs V, metadata bytes M), ``int32[P]`` prompt ids, ``int32[R]`` response ids, ``float32[R]`` log-probs,
``int32[V]`` version numbers, ``int32[V]`` run lengths, mask as bits ``[ceil(R / 8)]``, metadata as JSON ``[M]``. Images
are stored beside it (ledger_images.py).
"""

import json
import zlib
from typing import Any

import numpy as np

from ..trajectory import Trajectory

_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_CHECK = np.dtype("<u4")
_HEADER_BYTES = 4 * _INT.itemsize


def encode_arrays(trajectory: Trajectory) -> bytes:
    """Pack the arrays and the metadata of ``trajectory``; ids, mask, log-probs and versions stay exact."""
    numbers, lengths = _run_lengths(np.asarray(trajectory.versions, dtype=_INT))
    metadata = json.dumps(trajectory.metadata, default=_plain, separators=(",", ":")).encode()
    header = np.array(
        [len(trajectory.prompt_ids), len(trajectory.response_ids), len(numbers), len(metadata)], dtype=_INT
    )
    parts = (
        header.tobytes(),
        np.asarray(trajectory.prompt_ids, dtype=_INT).tobytes(),
        np.asarray(trajectory.response_ids, dtype=_INT).tobytes(),
        np.asarray(trajectory.log_probs, dtype=_FLOAT).tobytes(),
        numbers.tobytes(),
        lengths.tobytes(),
        np.packbits(np.asarray(trajectory.response_mask, dtype=bool)).tobytes(),
        metadata,
    )
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return b"".join((np.array(check, dtype=_CHECK).tobytes(), *parts))


def without_metadata(body: bytes) -> tuple[memoryview, memoryview]:
    """What of ``encode_arrays`` tells one row from another: neither the metadata nor what depends on it."""
    at = _CHECK.itemsize + _HEADER_BYTES - _INT.itemsize
    metadata = int(np.frombuffer(body, dtype=_INT, count=1, offset=at)[0])
    view = memoryview(body)
    return view[_CHECK.itemsize : at], view[at + _INT.itemsize : len(body) - metadata]


def decode_arrays(body: bytes) -> dict[str, Any]:
    """Inverse of ``encode_arrays``: the keyword arguments of ``Trajectory`` that it packed.

    Raises:
        ValueError: ``body`` is not what was written.
    """
    at = _CHECK.itemsize
    if len(body) < at + _HEADER_BYTES or zlib.crc32(memoryview(body)[at:]) != np.frombuffer(body, _CHECK, count=1)[0]:
        raise ValueError(f"the row's payload of {len(body)} bytes is not what was written")
    prompt, response, runs, _ = (int(n) for n in np.frombuffer(body, dtype=_INT, count=4, offset=at))
    at += _HEADER_BYTES

    def cut(dtype: np.dtype, count: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(body, dtype=dtype, count=count, offset=at)
        at += count * dtype.itemsize
        return array

    prompt_ids = cut(_INT, prompt)
    response_ids = cut(_INT, response)
    log_probs = cut(_FLOAT, response)
    versions = np.repeat(cut(_INT, runs), cut(_INT, runs))
    mask = np.unpackbits(cut(np.dtype("u1"), -(-response // 8)), count=response)
    return {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response_mask": mask,
        "log_probs": log_probs,
        "versions": versions,
        "metadata": json.loads(body[at:]),
    }


def _run_lengths(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    lengths = np.diff(np.concatenate((starts, [len(values)])))
    return values[starts], lengths.astype(_INT)


def _plain(value: Any) -> Any:
    """Numpy values as plain ones; anything else by its text, since metadata must never cost a workflow its rows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
