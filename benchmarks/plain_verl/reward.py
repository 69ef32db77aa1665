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
"""verl's custom reward function: the recipe's scoring, in verl's signature."""

from typing import Any

from recipe.multi_policy_async.workflows.base import Task
from recipe.multi_policy_async.workflows.scoring import score_message


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """As ``reward.custom_reward_function`` wants it (verl/experimental/reward_loop/reward_manager/naive.py)."""
    row = {
        "data_source": data_source,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": extra_info,
        "prompt": [],
    }
    return score_message(Task(0, row), solution_str)
