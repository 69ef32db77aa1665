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

"""Transcripts of a solver that computes with a tool, for the tiny models that agent frameworks are tried with.

The planner restates a reasoning-gym ``chain_sum`` question as an expression, the solver calls the tool ``calculate``
with it and says its result. Tool calls are written as Hermes and Qwen models write them. Torch-free.
"""

import json
import random
from dataclasses import replace

from .tiny_tokenizer import IM_END, IM_START
from .tiny_transcripts import ChainSum, Transcript, planner_transcript

TOOL = "calculate"
SYSTEMS = (None, "", "You are a helpful assistant.")  # what frameworks put first


def tool_call(expression: str) -> str:
    """The solver's first message."""
    call = json.dumps({"name": TOOL, "arguments": {"expression": expression}})
    return f"<tool_call>\n{call}\n</tool_call>"


def expression(chain: ChainSum) -> str:
    """What the solver gives to the tool: ``3 + 5 - 2``."""
    words = [str(chain.terms[0])]
    for operator, term in zip(chain.operators, chain.terms[1:], strict=True):
        words += [operator, str(term)]
    return " ".join(words)


def asking_transcript(question: str, chain: ChainSum, rng: random.Random, error_rate: float) -> Transcript:
    """The planner's, also behind a system message."""
    return replace(planner_transcript(question, chain, rng, error_rate), system=rng.choice(SYSTEMS))


def tool_user_transcript(question: str, chain: ChainSum, rng: random.Random, error_rate: float) -> Transcript:
    """One turn of the solver: its call, or what it says once the tool has answered.

    The prompt of the second kind holds the turns before it, in ChatML.
    """
    call = tool_call(expression(chain.misread(rng) if rng.random() < error_rate else chain))
    system = rng.choice(SYSTEMS)
    if rng.random() < 0.5:
        return Transcript(chain.plan, call, system)
    turns = f"{chain.plan}{IM_END}\n{IM_START}assistant\n{call}{IM_END}\n{IM_START}tool\n"
    return Transcript(f"{turns}{chain.value}", str(chain.value), system)


TOOL_ROLES = {"planner": asking_transcript, "solver": tool_user_transcript}
