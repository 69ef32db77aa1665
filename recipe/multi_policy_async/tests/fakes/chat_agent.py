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
"""An agent without a model, and a sum for it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...workflows.base import Scorer, Task
from ...workflows.scoring import extract_answer

QUESTION = "State the final answer to the following arithmetic problem: 3 + 5 ="


class ChatAgent:
    """Replies with ``reply`` and remembers what it was asked."""

    def __init__(self, reply: str):
        self.reply = reply
        self.asked: list[Sequence[Mapping[str, str]]] = []

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        self.asked.append(messages)
        return self.reply


async def _is_eight(task: Task, text: str) -> float:
    return float(extract_answer(text, numeric=True) == "8")


def chain_sum_task(
    index: int = 0,
    *,
    num_terms: int = 2,
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": QUESTION},),
    scorer: Scorer | None = _is_eight,
) -> Task:
    """A sum of ``assets/prepare_tasks.py``. ``scorer``: None for reasoning-gym's, whose import takes a second."""
    entry: dict[str, Any] = {"question": QUESTION, "answer": "8", "metadata": {"num_terms": num_terms}}
    row = {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [*messages],
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"index": index, "question": QUESTION, "entry": json.dumps(entry)},
    }
    return Task(index, row, scorer)
