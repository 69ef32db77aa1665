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
"""Tasks for one tiny solver: the planner's right message is the prompt, so that the solver alone decides the score."""

import json
from pathlib import Path

import pandas as pd

from recipe.multi_policy_async.assets.prepare_models import TINY
from recipe.multi_policy_async.assets.prepare_tasks import build_tasks
from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum


def write_plan_tasks(folder: Path, train_size: int = 512, val_size: int = 32, seed: int = 0) -> None:
    """Write ``folder/train.parquet`` and ``folder/val.parquet`` in the columns of ``assets/prepare_tasks.py``."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = build_tasks("chain_sum", TINY.tasks, train_size, val_size, seed)
    for name, rows in zip(("train", "val"), parts, strict=True):
        for row in rows:
            expression = json.loads(row["extra_info"]["entry"])["metadata"]["expression"]
            row["prompt"] = [{"role": "user", "content": ChainSum.parse(expression).plan}]
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet", index=False)
