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
"""The rows that generate together: their states, the model's calls and what each step samples."""

import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from . import decode_attention
from .generation_request import GenerationRequest
from .grammar import mask_logits
from .image_prompts import ImagePrompt
from .sampling import BatchSampler
from .slot_kv_cache import SlotKVCache

_PREFILL_TOKENS = 4096  # of one model call, padding included


@dataclass(eq=False)
class Row:
    request: GenerationRequest
    stop_ids: frozenset[int]
    generator: random.Random
    length: int  # tokens whose states are in the cache
    next_input: int


class RunningBatch:
    """Rows in the slots of one cache, all under one version of the weights. For one thread, in inference mode.

    Args:
        model: a causal language model with full attention in every layer, on the CPU.
    """

    def __init__(self, model: PreTrainedModel):
        model.set_attn_implementation(decode_attention.NAME)
        self._model = model.eval()
        self._cache = SlotKVCache(model.config.get_text_config().num_hidden_layers)
        self._sampler: BatchSampler | None = None
        self.rows: list[Row] = []

    def take_aborted(self) -> list[GenerationRequest]:
        """Take out the rows whose abort is wanted."""
        indices = range(len(self.rows) - 1, -1, -1)
        return [self._remove(index) for index in indices if self.rows[index].request.abort_wanted]

    def clear(self) -> list[GenerationRequest]:
        """Forget all rows and their states; returns their requests."""
        requests = [row.request for row in self.rows]
        self.rows.clear()
        self._sampler = None
        self.release()
        return requests

    def release(self) -> None:
        """Give the memory of the states back; there are no rows."""
        self._cache.release()

    def add(self, admitted: list[Row]) -> None:
        """Compute the states of new rows; rows with the same prompt (a group) compute them once."""
        if not admitted:
            return
        self._sampler = None
        groups: dict[Hashable, list[Row]] = {}
        for row in sorted(admitted, key=lambda r: len(r.request.prompt_ids)):
            groups.setdefault(_prompt_key(row.request), []).append(row)
        begin = len(self.rows)
        self.rows += [group[0] for group in groups.values()]
        end = twin = len(self.rows)
        self.rows += [row for group in groups.values() for row in group[1:]]
        first = begin
        while begin < end:
            begin = self._prefill_some(begin, end)
        for source, group in enumerate(groups.values(), start=first):
            length, twins = group[0].length, len(group) - 1
            self._cache.copy_row(source, twin, twin + twins, length)
            for row in group[1:]:
                row.length = length
            twin += twins

    def _prefill_some(self, first: int, end: int) -> int:
        """Prefill rows from ``first`` on, as many as fit in one model call; returns the first one left.

        A row with images has a call of its own.
        """
        if (image_prompt := self.rows[first].request.image_prompt) is not None:
            self._prefill_images(first, image_prompt)
            return first + 1
        last = first
        while last < end and self.rows[last].request.image_prompt is None:
            longest = len(self.rows[last].request.prompt_ids) - 1
            if last > first and longest * (last + 1 - first) > _PREFILL_TOKENS:
                break
            last += 1
        prompts = [row.request.prompt_ids[:-1] for row in self.rows[first:last]]
        longest = len(prompts[-1])
        if longest:
            ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
            # Padding is on the right, so causal attention alone keeps it away from every real token.
            mask = torch.full((longest, longest), -torch.inf, dtype=self._model.dtype).triu_(1)[None, None]
            self._cache.begin_prefill(first, last)
            self._forward(ids, torch.arange(longest)[None].expand(len(prompts), -1), mask)
        for row, prompt in zip(self.rows[first:last], prompts, strict=True):
            row.length = len(prompt)
        return last

    def _prefill_images(self, index: int, prompt: ImagePrompt) -> None:
        row = self.rows[index]
        ids = row.request.prompt_ids[:-1]
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=self._model.dtype).triu_(1)[None, None]
        self._cache.begin_prefill(index, index + 1)
        self._forward(torch.tensor([ids]), prompt.positions[:, None, :-1], mask, **prompt.pixels)
        row.length = len(ids)

    def decode(self) -> list[GenerationRequest]:
        """Sample one token for every row; returns the requests that this ends."""
        rows = self.rows
        if not rows:
            return []
        lengths = [row.length for row in rows]
        longest = max(lengths)
        positions = torch.tensor(lengths)
        ids = torch.tensor([row.next_input for row in rows])
        mask = torch.zeros(len(rows), longest + 1, dtype=self._model.dtype)
        mask.masked_fill_(torch.arange(longest + 1)[None] > positions[:, None], -torch.inf)
        self._cache.begin_decode(positions, longest)
        if any(row.request.image_prompt is not None for row in rows):  # behind an image places are not positions
            shifts = [row.request.image_prompt.shift if row.request.image_prompt else 0 for row in rows]
            positions = positions + torch.tensor(shifts)
        logits = self._forward(ids[:, None], positions[:, None], mask[:, None, None])[:, -1]
        if self._sampler is None:
            self._sampler = BatchSampler([r.request.params for r in rows], [r.generator for r in rows])
        matchers = [row.request.matcher for row in rows]
        if any(matcher is not None for matcher in matchers):
            logits = mask_logits(logits, matchers)
        tokens, log_probs = self._sampler(logits)
        finished = []
        for index in range(len(rows) - 1, -1, -1):  # backwards: a removal moves only rows already seen
            row, token, log_prob = rows[index], tokens[index], log_probs[index]
            request = row.request
            row.length += 1
            row.next_input = token
            if log_prob != log_prob:
                request.error = "the model's logits are not finite"
                request.finish_reason = {"type": "abort", "message": request.error}
                finished.append(self._remove(index))
                continue
            request.output_ids.append(token)
            request.log_probs.append(log_prob)
            if request.matcher is not None:
                request.matcher.consume_token(token)
            if token in row.stop_ids:
                request.finish_reason = {"type": "stop", "matched": token}
            elif len(request.output_ids) >= request.params.max_new_tokens:
                request.finish_reason = {"type": "length", "length": len(request.output_ids)}
            if request.finish_reason is not None:
                finished.append(self._remove(index))
            elif request.on_token is not None:
                request.on_token(request)
        return finished

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, **pixels: Any) -> torch.Tensor:
        return self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **pixels,
        ).logits

    def _remove(self, index: int) -> GenerationRequest:
        """Take a row out; the last row moves into its place."""
        request = self.rows[index].request
        moved = self.rows.pop()
        if index < len(self.rows):
            self._cache.copy_row(len(self.rows), index, index + 1, moved.length)
            self.rows[index] = moved
        self._sampler = None
        return request


def _prompt_key(request: GenerationRequest) -> Hashable:
    return tuple(request.prompt_ids), request.image_prompt and request.image_prompt.images
