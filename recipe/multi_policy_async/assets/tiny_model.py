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
"""The tiny Qwen3 models: their shape and the short supervised run that warm-starts them."""

from collections.abc import Iterator
from itertools import islice
from math import cos, pi
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from .tiny_tokenizer import END_OF_TEXT, IM_END, IM_START
from .tiny_transcripts import Transcript

IGNORED = -100  # label of a token without loss


def new_model(tokenizer: Tokenizer, shape: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with random weights, float32.

    Args:
        shape: ``Qwen3Config`` arguments (``hidden_size``, ``num_hidden_layers``, ...).
        seed: of the weights.
    """
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        **shape,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model


def encode(tokenizer: Tokenizer, transcript: Transcript) -> tuple[list[int], list[int]]:
    """Ids of the ChatML prompt and of the reply with its end token."""
    prompt = f"{IM_START}user\n{transcript.prompt}{IM_END}\n{IM_START}assistant\n"
    if transcript.system is not None:
        prompt = f"{IM_START}system\n{transcript.system}{IM_END}\n{prompt}"
    reply = f"{transcript.reply}{IM_END}"
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, reply))


def batches(
    tokenizer: Tokenizer, transcripts: Iterator[Transcript], batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches, padded on the right: ids int64 [B, T] and labels int64 [B, T], the loss on replies only."""
    pad = tokenizer.token_to_id(END_OF_TEXT)
    while True:
        rows = [encode(tokenizer, transcript) for transcript in islice(transcripts, batch_size)]
        width = max(len(prompt) + len(reply) for prompt, reply in rows)
        ids = torch.full((len(rows), width), pad)
        labels = torch.full((len(rows), width), IGNORED)
        for row, (prompt, reply) in enumerate(rows):
            end = len(prompt) + len(reply)
            ids[row, :end] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : end] = torch.tensor(reply)
        yield ids, labels


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    transcripts: Iterator[Transcript],
    *,
    steps: int,
    batch_size: int,
    lr: float,
) -> float:
    """Supervised training in place: AdamW, a tenth of the steps linear warm-up, then cosine to zero.

    Returns:
        Mean loss in nats per reply token over the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(1, steps // 10)
    losses = []
    model.train()
    for step, (ids, labels) in enumerate(islice(batches(tokenizer, transcripts, batch_size), steps)):
        share = min(1.0, (step + 1) / warm_up) * 0.5 * (1 + cos(pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * share
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        trained = labels[:, 1:] != IGNORED
        # The head runs on the trained positions only: the prompt is most of a row.
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config, generation config and float32 safetensors."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
