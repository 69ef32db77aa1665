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
"""Tasks from verl's ``data`` section, read without torch."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .base import Scorer, Task

logger = logging.getLogger(__name__)


class TaskSource(Protocol):
    """Anything with a length and items; rows may be made on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


class TaskDataset:
    """Rows in verl's RLHF columns (``data_source``, ``prompt``, ``ability``, ``reward_model``, ``extra_info``).

    Args:
        rows: the rows.
        prompt_key: column with the messages.
        indices: rows to keep, in this order.
        scorer: judges answers to the tasks.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        prompt_key: str,
        indices: Sequence[int] | None = None,
        scorer: Scorer | None = None,
    ):
        self._scorer = scorer
        self._rows = rows
        self._prompt_key = prompt_key
        self._indices = range(len(rows)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Task:
        row = dict(self._rows[int(self._indices[index])])
        if self._prompt_key not in row:
            raise ValueError(
                f"task {index} has no column {self._prompt_key!r} (data.prompt_key); columns: {sorted(row)}"
            )
        row["prompt"] = _messages(row[self._prompt_key])
        return Task(index, row, self._scorer)


def load_tasks(data: Mapping[str, Any], split: str = "train", scorer: Scorer | None = None) -> TaskSource:
    """Tasks of ``split`` (``train`` or ``val``) as the keys of verl's ``data`` section say.

    Read are ``<split>_files``, ``<split>_max_samples``, ``prompt_key``, ``shuffle``, ``seed`` and ``custom_cls``; where
    one is missing, verl's own default holds (verl/trainer/config/data/legacy_data.yaml). The choice of
    ``max_samples`` rows is verl's (verl/utils/dataset/rl_dataset.py:RLHFDataset). Length filters are not applied:
    the gateway refuses prompts that are too long, and what the agents will say is not known here. ``scorer`` judges
    answers to the tasks; ``None``: the verifier of each task's ``data_source``.

    Raises:
        ValueError: no files, a missing file, an unknown format, no rows, or a missing prompt column.
    """
    files = data.get(f"{split}_files") or ()
    files = [str(files)] if isinstance(files, str | Path) else [str(file) for file in files]
    if not files:
        raise ValueError(f"data.{split}_files names no file")
    custom = data.get("custom_cls") or {}
    if custom.get("path"):
        return _CustomDataset(_load_custom(files, data, split), scorer)
    rows = _Concatenated([_read(Path(file).expanduser()) for file in files])
    if len(rows) == 0:
        raise ValueError(f"data.{split}_files: no rows in {', '.join(files)}")
    tasks = TaskDataset(
        rows,
        prompt_key=data.get("prompt_key") or "prompt",
        indices=_chosen(len(rows), data, f"{split}_max_samples"),
        scorer=scorer,
    )
    tasks[0]  # a missing column shows now, not in the first workflow
    return tasks


def _chosen(total: int, data: Mapping[str, Any], key: str) -> Sequence[int] | None:
    most = data.get(key)
    if most is None or most < 0 or most >= total:
        return None
    if not data.get("shuffle"):
        return range(most)
    return np.random.default_rng(data.get("seed")).choice(total, size=most, replace=False)


def _read(file: Path) -> Sequence[Mapping[str, Any]]:
    if not file.is_file():
        raise ValueError(f"data: {file} is not a file")
    if file.suffix == ".parquet":
        return _ParquetRows(file)
    if file.suffix in (".json", ".jsonl"):
        with file.open() as lines:
            return [json.loads(line) for line in lines if line.strip()]
    raise ValueError(f"data: {file} is neither .parquet nor .jsonl")


class _ParquetRows(Sequence[Mapping[str, Any]]):
    """Rows of a parquet file, kept as columns and made into dicts one by one."""

    def __init__(self, file: Path):
        import pyarrow.parquet  # here: a quarter of a second that other parts need not spend

        self._table = pyarrow.parquet.read_table(file)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


class _Concatenated(Sequence[Mapping[str, Any]]):
    def __init__(self, parts: Sequence[Sequence[Mapping[str, Any]]]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


class _CustomDataset:
    """A dataset class of verl's ``data.custom_cls``: its items are the rows."""

    def __init__(self, dataset: Any, scorer: Scorer | None):
        self._dataset = dataset
        self._scorer = scorer

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Task:
        row = dict(self._dataset[index])
        # verl's own dataset takes the messages out of `prompt` and gives them as `raw_prompt`.
        row.setdefault("prompt", row.get("raw_prompt"))
        return Task(index, row, self._scorer)


def _load_custom(files: list[str], data: Mapping[str, Any], split: str) -> Any:
    """Needs verl (and so torch) in this process, and a tokenizer, which verl's dataset interface demands."""
    from omegaconf import OmegaConf
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import get_dataset_class

    logger.info("data.custom_cls is set: verl is imported to load it")
    config = OmegaConf.create(dict(data))
    tokenizer = hf_tokenizer(data["tokenizer"]) if data.get("tokenizer") else None
    return get_dataset_class(config)(
        data_files=files,
        tokenizer=tokenizer,
        processor=None,
        config=config,
        max_samples=data.get(f"{split}_max_samples", -1),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts; a bare string is one user message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [dict(message) for message in value]
