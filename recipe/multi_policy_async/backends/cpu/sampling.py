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
"""What a generation request may ask for, and how a batch of rows is sampled."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's own


class InvalidRequest(ValueError):
    """A generation request that cannot be served as it is: the client's fault."""


_ONLY_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "logprobs", "do_sample"}
"""Accepted and without effect: they concern text, or ask for the log-probs that are always computed."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ("", []),
    "stop_regex": ("", []),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "min_new_tokens": (0,),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "logit_bias": ({},),
    "custom_params": ({},),
    "stream_interval": (1,),
}
"""Known to SGLang, implemented here only at these values: anything else is refused, never ignored."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters under SGLang's names and defaults.

    ``temperature`` 0 is greedy. ``top_k`` <= 0, ``top_p`` 1 and ``min_p`` 0 are off.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    seed: int | None = None
    json_schema: str = ""  # the answer must match it; empty: it may be anything

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, ">= 0"),
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "finite and >= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
        )
        for name, valid, rule in checks:
            if not valid:
                raise InvalidRequest(f"{name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether the distribution sampled from lacks part of the vocabulary."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "SamplingParams":
        """From SGLang's ``sampling_params``; vLLM's ``max_tokens`` and ``seed`` are accepted too, null is absent.

        Raises:
            InvalidRequest: a value is out of range or of another type, or a parameter has no effect here.
        """
        given = {name: value for name, value in given.items() if value is not None and name not in _ONLY_TEXT}
        for name, neutral in _NEUTRAL.items():
            value = given.pop(name, neutral[0])
            if value not in neutral:
                raise InvalidRequest(f"sampling parameter {name}={value!r} is not supported by the CPU rollout server")
        aliases = {"max_tokens": "max_new_tokens", "sampling_seed": "seed"}
        values: dict[str, Any] = {aliases.get(name, name): value for name, value in given.items()}
        unknown = values.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InvalidRequest(f"unknown sampling parameter(s): {', '.join(sorted(unknown))}")
        try:
            for name in ("max_new_tokens", "top_k", "seed"):
                if name in values:
                    values[name] = _integer(values[name])
            for name in ("temperature", "top_p", "min_p"):
                if name in values:
                    values[name] = float(values[name])
            if "stop_token_ids" in values:
                values["stop_token_ids"] = frozenset(_integer(token) for token in values["stop_token_ids"])
            if "ignore_eos" in values:
                values["ignore_eos"] = bool(values["ignore_eos"])
            if not isinstance(values.get("json_schema", ""), str):
                raise TypeError("json_schema is a text")
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a sampling parameter has the wrong type: {error}") from error
        return cls(**values)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


class BatchSampler:
    """Samples one token per row of a batch whose membership stays the same from call to call.

    The log-prob of a token is that of the distribution it was drawn from: ``log_softmax(logits / temperature)``, which
    is what verl's trainer recomputes when it divides the logits by the rollout temperature (semantics.md). With top_p,
    top_k or min_p on, the distribution is renormalised over the tokens left, as vLLM's ``processed_logprobs`` (verl's
    default) does, and the trainer's recomputation differs by that normalisation. Greedy rows report
    ``log_softmax(logits)``, as SGLang does.

    A seeded row draws one uniform number per token from its own generator, so its tokens do not depend on which other
    rows share the batch.
    """

    def __init__(self, params: list[SamplingParams], generators: list[random.Random]):
        assert len(params) == len(generators), "one generator per row"
        self._generators = generators
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        self._scale = None
        if any(t != 1.0 for t in temperatures):
            self._scale = torch.tensor(temperatures, dtype=torch.float32).reciprocal_().unsqueeze_(1)
        self._greedy = [row for row, p in enumerate(params) if p.greedy]
        self._filtered = [row for row, p in enumerate(params) if p.filtered]
        if self._filtered:
            kept = [params[row] for row in self._filtered]
            self._top_p = torch.tensor([p.top_p for p in kept]).unsqueeze_(1)
            self._top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in kept]).unsqueeze_(1)
            self._min_p = torch.tensor([p.min_p for p in kept]).unsqueeze_(1)

    def __call__(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Tokens and their log-probs for ``logits`` [rows, vocabulary]."""
        logits = logits.float()
        if self._scale is not None:
            logits = logits * self._scale
        log_probs = torch.log_softmax(logits, dim=-1)
        probs = log_probs.exp()
        if self._filtered:
            kept = self._keep(probs[self._filtered])
            probs[self._filtered] = kept
            log_probs[self._filtered] = kept.log()
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        uniform = torch.tensor([g.random() for g in self._generators], dtype=torch.float64).unsqueeze_(1)
        # right=True: the first token whose cumulative probability exceeds the draw, never one of probability 0.
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)
        for row in self._greedy:
            tokens[row] = logits[row].argmax()
        chosen = log_probs.gather(1, tokens)
        return tokens.squeeze(1).tolist(), chosen.squeeze(1).tolist()

    def _keep(self, probs: torch.Tensor) -> torch.Tensor:
        """Zero what top_k, top_p and min_p exclude, each judged on the full distribution as SGLang does."""
        ordered, order = probs.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1]).unsqueeze_(0)
        before = ordered.cumsum(dim=-1) - ordered
        excluded = (rank >= self._top_k) | (before > self._top_p) | (ordered < self._min_p * ordered[:, :1])
        excluded[:, 0] = False
        ordered = ordered.masked_fill(excluded, 0.0)
        ordered /= ordered.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs).scatter_(1, order, ordered)
