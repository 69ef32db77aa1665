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
"""Sampling under a JSON schema, with llguidance, which SGLang can use too (``--grammar-backend llguidance``)."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .sampling import InvalidRequest

try:
    import llguidance
    import llguidance.torch
except ModuleNotFoundError:  # of the extra cpu; a verl checkout without it serves everything else
    llguidance = None


# Where white space is free, a small model may go on with it for ever.
_JSON = {"whitespace_flexible": False}


class Grammars:
    """Makes matchers over one model's vocabulary.

    Args:
        model_path: folder with tokenizer.json, read at the first use: the engine itself needs no tokenizer.
        eos_token_ids: the first one ends a complete answer.
        vocab_size: of the model's logits.
    """

    def __init__(self, model_path: str | Path, eos_token_ids: Iterable[int], vocab_size: int):
        self._file = Path(model_path) / "tokenizer.json"
        self._eos_token_id = next(iter(eos_token_ids), None)
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None

    def matcher(self, json_schema: str) -> "llguidance.LLMatcher":
        """A fresh matcher of one request.

        Raises:
            InvalidRequest: the schema is none, or this server cannot follow any.
        """
        if llguidance is None or not self._file.exists():
            raise InvalidRequest("json_schema needs the package llguidance and a model with a tokenizer.json")
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                self._file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos_token_id
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json_schema, defaults=_JSON)
        except ValueError as error:
            raise InvalidRequest(f"json_schema: {error}") from error
        if fault := llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise InvalidRequest(f"json_schema: {fault}")
        return llguidance.LLMatcher(self._tokenizer, grammar)


def mask_logits(logits: torch.Tensor, matchers: Sequence["llguidance.LLMatcher | None"]) -> torch.Tensor:
    """``logits`` [rows, vocabulary] with -inf where a row's matcher allows no token; rows without one as they are."""
    logits = logits.float()
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            allowed = llguidance.torch.allocate_token_bitmask(1, logits.shape[-1])
            llguidance.torch.fill_next_token_bitmask(matcher, allowed, 0)
            llguidance.torch.apply_token_bitmask_inplace(logits[row : row + 1], allowed)
    return logits
