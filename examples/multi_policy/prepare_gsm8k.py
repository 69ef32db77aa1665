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
"""GSM8K from the hub as parquet in verl's RLHF columns; verl's own scorer for ``openai/gsm8k`` judges the answers."""

import argparse
from pathlib import Path
from typing import Any


def row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One task. GSM8K writes the final number of a solution after ``####``."""
    answer = example["answer"].rpartition("####")[2].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": example["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": example["question"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    out = parser.parse_args().out
    import datasets
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        examples = datasets.load_dataset("openai/gsm8k", "main", split=split)
        rows = [row(example, split, index) for index, example in enumerate(examples)]
        pd.DataFrame(rows).to_parquet(out / f"{split}.parquet", index=False)
        print(f"{out / split}.parquet: {len(rows)} tasks")


if __name__ == "__main__":
    main()
