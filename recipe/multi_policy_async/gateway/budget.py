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
"""How long a prompt may be and how much a call may sample.

Checked before anything is sent, since servers answer over-long prompts in many ways.
"""

from typing import TYPE_CHECKING

from ..gateway_binding_registry import ModelBinding
from .call import Call, CallState
from .errors import ContextLengthExceeded

if TYPE_CHECKING:
    from .history import Prompt


def check_possible(binding: ModelBinding, prompt_tokens: int) -> None:
    """Refuse a prompt too long for any row, before what takes time by its length.

    Raises:
        ContextLengthExceeded: it is.
    """
    if prompt_tokens >= binding.max_model_len:
        response_budget(binding, prompt_tokens, None)


def call_budget(binding: ModelBinding, prompt: "Prompt", asked: int | None, *, merged: bool) -> tuple[int, bool]:
    """Tokens a call may sample, and whether it must go on in its parent's row.

    The latter when a conversation outgrew the longest prompt of a row, but still fits behind its own row's prompt.

    Raises:
        ContextLengthExceeded: see ``response_budget``.
    """
    parent, length = prompt.parent, len(prompt.ids)
    alive = parent is not None and parent.state != CallState.ABANDONED
    if merged and length > binding.max_prompt_length and alive:
        other = parent.extended_by
        if other is prompt.supersedes and other is not None and other.extended_by is None:
            other = None  # rewritten: its place is free
        used = length - _row_prompt_tokens(parent, binding.max_response_length)
        left = min(binding.max_response_length - used, binding.max_model_len - length)
        if left > 0 and (other is None or not other.bound):
            return min(asked or left, left), True
    return response_budget(binding, length, asked), False


def response_budget(binding: ModelBinding, prompt_tokens: int, asked: int | None) -> int:
    """Tokens a call may sample behind a prompt that begins a row.

    A budget that the client left open shrinks to the room there is; one above ``max_response_length`` is cut to it.

    Raises:
        ContextLengthExceeded: the prompt, or the prompt with the budget asked for, does not fit.
    """
    limit = min(binding.max_prompt_length, binding.max_model_len - 1)
    if prompt_tokens > limit:
        raise ContextLengthExceeded(
            prompt=prompt_tokens, budget=0, limit=limit, what=f"the longest prompt of model {binding.model_id}"
        )
    room = binding.max_model_len - prompt_tokens
    if asked is None:
        return min(binding.max_response_length, room)
    budget = min(asked, binding.max_response_length)
    if budget > room:
        raise ContextLengthExceeded(
            prompt=prompt_tokens,
            budget=budget,
            limit=binding.max_model_len,
            what=f"the maximum context length of model {binding.model_id}",
        )
    return budget


def _row_prompt_tokens(parent: Call, max_response_length: int) -> int:
    """Prompt length of the merged row that ends with ``parent``; rows end where the next turn would not fit."""
    turns = [parent]
    while turns[-1].prompt.parent is not None:
        turns.append(turns[-1].prompt.parent)
    start = turns[-1]
    for turn in reversed(turns):
        if len(turn.prompt_ids) - len(start.prompt_ids) + len(turn.ids) > max_response_length:
            start = turn
    return len(start.prompt_ids)
