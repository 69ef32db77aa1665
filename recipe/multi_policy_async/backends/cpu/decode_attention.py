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
"""Attention for one new token per row, without copying the cache.

transformers' ``sdpa`` repeats keys and values for every query head before it calls the kernel, at each layer and each
token: two thirds of the time of a small model's step. Here the query heads that share a key head are one matrix.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "multi_policy_async_decode"


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; several tokens per row (prefill) go to ``sdpa``.

    Args:
        query: [rows, heads, tokens, head_dim].
        key, value: [rows, kv_heads, length, head_dim], views into the cache.
        attention_mask: additive, [rows, 1, tokens, length].

    Returns:
        [rows, tokens, heads, head_dim], and no weights.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention with soft caps or sinks is not supported by the CPU rollout server")
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    shared = heads // kv_heads
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(rows * kv_heads, shared, head_dim)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)).view(rows, kv_heads, shared, length)
    if attention_mask is not None:
        scores += attention_mask
    weights = torch.softmax(scores, dim=-1).view(rows * kv_heads, shared, length)
    output = torch.bmm(weights, value.flatten(0, 1))
    return output.view(rows, 1, heads, head_dim), None


AttentionInterface.register(NAME, decode_attention)
