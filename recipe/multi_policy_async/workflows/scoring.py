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
"""Scores an answer with the user's reward function, or the verifier that belongs to the task's ``data_source``.

Torch-free for reasoning-gym and for users' functions.
"""

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from .base import Scorer, Task
from .loader import load_attribute

REASONING_GYM = "reasoning_gym/"
_VERIFIERS = ThreadPoolExecutor(4, thread_name_prefix="verifier")  # apart from asyncio's, which others may fill
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip()) is not None


def extract_answer(text: str, numeric: bool) -> str | None:
    """The answer in a model's message: the last ``<answer>`` tag, else the last number, else the whole message.

    Args:
        numeric: a number is expected; without one in the message there is no answer.
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        text = tagged[-1]
    if numeric:
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else None
    return text.strip() or None


async def score_in_thread(task: Task, text: str) -> float:
    """``score_message`` beside the event loop: verifiers may be slow, and the first one is imported here."""
    return await asyncio.get_running_loop().run_in_executor(_VERIFIERS, score_message, task, text)


def score_message(task: Task, text: str) -> float:
    """Score of a model's final message for one dataset row, by the dataset's own verifier.

    Args:
        task: a row in verl's RLHF columns. ``reasoning_gym/<dataset>`` goes to reasoning-gym's ``score_answer`` with
            the row's ``extra_info['entry']``; any other ``data_source`` to verl's ``default_compute_score``
            (verl/utils/reward_score), which sees the whole message.

    Raises:
        NotImplementedError: verl knows no scorer for the ``data_source``.
    """
    source = task["data_source"]
    truth = str(task.ground_truth)
    if source.startswith(REASONING_GYM):
        answer = extract_answer(text, is_number(truth))
        entry = json.loads(task["extra_info"]["entry"])
        return float(_reasoning_gym_verifier(source.removeprefix(REASONING_GYM))(answer, entry))
    from verl.utils.reward_score import default_compute_score  # here: it imports torch

    result = default_compute_score(source, text, truth, extra_info=dict(task["extra_info"]))
    return float(result["score"] if isinstance(result, dict) else result)


def load_reward_function(path: str, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """A function of verl's ``reward.custom_reward_function``, plain or async (verl/trainer/ppo/reward.py).

    It is called as verl's ``NaiveRewardManager`` does, with ``data_source``, ``solution_str``, ``ground_truth``,
    ``extra_info`` and ``kwargs``, and answers with a number, or a mapping whose ``score`` counts. verl is not imported,
    and what verl adds to ``extra_info`` (``num_turns``, ``rollout_reward_scores``) is not there.

    Args:
        path: a ``.py`` file or ``pkg://module``.
        name: the function in it.
        kwargs: more keyword arguments of each call.

    Returns:
        A scorer; a plain function runs in a thread, beside the event loop.

    Raises:
        ValueError: there is no such file, module or function.
    """
    function = load_attribute(path, name)
    if not callable(function):
        raise ValueError(f"{name} in {path} is not a function")

    async def score(task: Task, text: str) -> float:
        call = partial(
            function,
            data_source=task.get("data_source"),
            solution_str=text,
            ground_truth=task.ground_truth,
            extra_info=dict(task.get("extra_info") or {}),
            **kwargs,
        )
        if inspect.iscoroutinefunction(function):
            result = await call()
        else:
            result = await asyncio.get_running_loop().run_in_executor(_VERIFIERS, call)
        value = float(result["score"] if isinstance(result, Mapping) else result)
        if not math.isfinite(value):
            raise ValueError(f"{name} gave {value} for an answer to task {task.index}, not a finite number")
        return value

    return score


@lru_cache
def _reasoning_gym_verifier(dataset: str) -> Callable[[str | None, dict[str, Any]], float]:
    import reasoning_gym  # here: it takes 1.5 seconds, which jobs on other data need not spend

    return reasoning_gym.get_score_answer_fn(dataset)
