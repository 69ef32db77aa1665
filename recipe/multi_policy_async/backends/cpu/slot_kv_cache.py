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
"""A key-value cache in which every batch row has its own length."""

import torch
from transformers import Cache

_LENGTH_STEP = 64
_ROWS_STEP = 8


class SlotKVCache(Cache):
    """Keys and values of all running rows, rows 0..n-1, each left-aligned with its own length.

    transformers' own caches keep all rows at one length, so a row that joins late would need padding in front and a
    row that leaves would hold its place. Here a model call is told where its tokens go (``begin_prefill`` or
    ``begin_decode``), ``update`` writes them there, and attention sees a view, not a copy. Memory grows with use, in
    steps, and is given back by ``release``.
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[])
        self._num_layers = num_layers
        self._keys: list[torch.Tensor] = []  # per layer [rows, kv_heads, length, head_dim]
        self._values: list[torch.Tensor] = []
        self._rows = 0
        self._length = 0
        self._prefill: tuple[int, int] | None = None  # first row, after the last
        self._decode_rows = torch.empty(0, dtype=torch.long)
        self._decode_at = torch.empty(0, dtype=torch.long)
        self._decode_length = 0

    def begin_prefill(self, first: int, last: int) -> None:
        """The next model call holds the first tokens of rows ``first..last-1``, right-padded to one length."""
        self._prefill = (first, last)

    def begin_decode(self, lengths: torch.Tensor, longest: int) -> None:
        """The next model call holds one token for each of rows 0..n-1, at position ``lengths`` [n]."""
        self._prefill = None
        if len(self._decode_rows) != len(lengths):
            self._decode_rows = torch.arange(len(lengths))
        self._decode_at = lengths
        self._decode_length = longest + 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the states [rows, kv_heads, tokens, head_dim] of one layer and return what attention looks at."""
        if self._prefill is not None:
            first, last = self._prefill
            tokens = key_states.shape[2]
            self._reserve(layer_idx, last, tokens, key_states)
            self._keys[layer_idx][first:last, :, :tokens] = key_states
            self._values[layer_idx][first:last, :, :tokens] = value_states
            return key_states, value_states
        rows = len(self._decode_rows)
        self._reserve(layer_idx, rows, self._decode_length, key_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._decode_rows, :, self._decode_at] = key_states[:, :, 0]
        values[self._decode_rows, :, self._decode_at] = value_states[:, :, 0]
        return keys[:rows, :, : self._decode_length], values[:rows, :, : self._decode_length]

    def copy_row(self, source: int, first: int, last: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to rows ``first..last-1``."""
        if first == last or not length:
            return
        for layer in range(len(self._keys)):
            self._reserve(layer, last, length, self._keys[layer])
            for store in (self._keys, self._values):
                store[layer][first:last, :, :length] = store[layer][source, :, :length]

    def release(self) -> None:
        """Forget all rows and give the memory back."""
        self._keys, self._values = [], []
        self._rows = self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._decode_length

    def _reserve(self, layer_idx: int, rows: int, length: int, like: torch.Tensor) -> None:
        """Make room in one layer; all layers follow the same sizes, the first one decides them."""
        if layer_idx < len(self._keys):
            held = self._keys[layer_idx]
            if held.shape[0] >= rows and held.shape[2] >= length:
                return
        if rows > self._rows:
            self._rows = max(_round_up(rows, _ROWS_STEP), 2 * self._rows if self._rows else 0)
        if length > self._length:
            self._length = max(_round_up(length, _LENGTH_STEP), self._length * 5 // 4)
        shape = (self._rows, like.shape[1], self._length, like.shape[3])
        for store in (self._keys, self._values):
            # Zeros, not uninitialised memory: attention multiplies masked positions by zero, and 0 * NaN is NaN.
            grown = torch.zeros(shape, dtype=like.dtype)
            if layer_idx < len(store):
                old = store[layer_idx]
                grown[: old.shape[0], :, : old.shape[2]] = old
                store[layer_idx] = grown
            else:
                assert layer_idx == len(store), "layers arrive in order"
                store.append(grown)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
