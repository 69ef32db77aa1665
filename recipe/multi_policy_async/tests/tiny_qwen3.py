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
"""A throw-away Qwen3 model for the tests of the CPU backend: random weights, tiny vocabulary, built in milliseconds."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 97
EOS = 96

torch.set_num_threads(1)  # at these sizes threads only wait for each other, for seconds on a busy machine


def tiny_qwen3(seed: int = 0, layers: int = 2, vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a wrong cache shows in the log-probs
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    return model


def save_tiny_qwen3(folder: Path, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    tiny_qwen3(seed, vocabulary=vocabulary).save_pretrained(folder)
    return folder


@torch.no_grad()
def full_forward_log_probs(
    model: torch.nn.Module, prompt: list[int], output: list[int], temperature: float = 1.0
) -> list[float]:
    """What verl's trainer recomputes: one forward pass over the whole row, logits divided by the temperature."""
    logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
