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
"""Writes tasks as parquet in verl's RLHF columns: ``python -m recipe.multi_policy_async.assets.prepare_tasks --help``.

The tasks come from the PyPI package ``reasoning-gym`` (procedurally generated, each dataset with its own verifier).
Columns: ``data_source`` (``reasoning_gym/<dataset>``), ``prompt`` (messages), ``ability``, ``reward_model`` (style and
ground truth) and ``extra_info`` (split, index, the question, and the entry as JSON that the verifier asks for).
Torch-free.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import reasoning_gym

DATA_SOURCE_PREFIX = "reasoning_gym/"
GENERATION_ROUNDS = 20  # rounds of generation in search of tasks that are not there yet


def build_tasks(
    dataset: str, settings: dict[str, Any], train_size: int, val_size: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for training and validation; no question stands in both.

    Questions may repeat within the training rows when the setting has too few different ones, never within the
    validation rows.

    Args:
        dataset: reasoning-gym's name, for example ``chain_sum``.
        settings: of that dataset (``min_terms``, ``max_digits``, ...).
        seed: the same seed gives the same rows.

    Raises:
        ValueError: the setting has too few different questions for the two parts.
    """
    entries = _generate(dataset, settings, seed, train_size + val_size)
    different = {entry["question"]: entry for entry in entries}
    val = list(different.values())[:val_size]
    held_out = {entry["question"] for entry in val}
    train = [entry for entry in entries if entry["question"] not in held_out][:train_size]
    if len(val) < val_size or len(train) < train_size:
        raise ValueError(
            f"{dataset} with {settings} gives {len(different)} different questions in "
            f"{len(entries)} draws: too few for {train_size} training and {val_size} validation rows"
        )
    return (
        [_row(dataset, entry, "train", index) for index, entry in enumerate(train)],
        [_row(dataset, entry, "val", index) for index, entry in enumerate(val)],
    )


def _generate(dataset: str, settings: dict[str, Any], seed: int, size: int) -> list[dict[str, Any]]:
    """Draws whose different questions alone fill both parts; else all draws, repetitions included."""
    draws: list[dict[str, Any]] = []
    different: dict[str, dict[str, Any]] = {}
    for part in range(GENERATION_ROUNDS):
        # Seeds are far apart: reasoning-gym adds the index to them.
        draws += list(
            reasoning_gym.create_dataset(dataset, seed=seed * 10_000_019 + part * size, size=size, **settings)
        )
        different = {entry["question"]: entry for entry in draws}
        if len(different) >= size:
            return list(different.values())
    return draws


def _row(dataset: str, entry: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": f"{DATA_SOURCE_PREFIX}{dataset}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {
            "split": split,
            "index": index,
            "question": entry["question"],
            # As text: a parquet column of mixed dictionaries would give every row every other row's keys.
            "entry": json.dumps(entry, default=str),
        },
    }


def write_tasks(out: Path, dataset: str, settings: dict[str, Any], train_size: int, val_size: int, seed: int) -> None:
    """Write ``out/train.parquet`` and ``out/val.parquet``; see ``build_tasks``."""
    train, val = build_tasks(dataset, settings, train_size, val_size, seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("val", val)):
        pd.DataFrame(rows).to_parquet(out / f"{name}.parquet", index=False)


def parse_setting(text: str) -> tuple[str, Any]:
    """``name=value``, the value read as JSON where it is JSON.

    Raises:
        argparse.ArgumentTypeError: no ``=`` in the text.
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="chain_sum", help="a dataset of reasoning-gym")
    parser.add_argument(
        "--setting", action="append", type=parse_setting, default=[], metavar="NAME=VALUE", help="of that dataset"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--val-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write_tasks(args.out, args.dataset, dict(args.setting), args.train_size, args.val_size, args.seed)
    print(f"{args.out}: {args.train_size} training and {args.val_size} validation tasks of {args.dataset}")


if __name__ == "__main__":
    main()
