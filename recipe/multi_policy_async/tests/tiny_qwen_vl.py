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
"""Throw-away Qwen-VL models with an image processor: random weights, tiny sizes, built in milliseconds."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from recipe.multi_policy_async.gateway.tokenizer import PolicyTokenizer
from recipe.multi_policy_async.tests.fakes.tiny_vl_folder import END, PAD, PROCESSOR, START, VIDEO, make_vl_folder
from recipe.multi_policy_async.vision import ImageProcessor

torch.set_num_threads(1)  # at these sizes threads only wait for each other, for seconds on a busy machine

KINDS = ("qwen3_vl", "qwen2_5_vl")
_TEXT = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # far from uniform, so that a wrong cache or position shows in the log-probs
    "tie_word_embeddings": True,
}
_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PROCESSOR["patch_size"],
    "spatial_merge_size": PROCESSOR["merge_size"],
    "temporal_patch_size": PROCESSOR["temporal_patch_size"],
    "initializer_range": 0.3,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_IDS = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def tiny_vl_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "qwen3_vl":
        text = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
        vision = {**_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        config, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    else:
        text = {**_TEXT, "rope_parameters": _ROPE}
        vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        config, model_class = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    config = config(text_config=text, vision_config=vision, tie_word_embeddings=True, **_IDS)
    return model_class._from_config(config, attn_implementation="sdpa").eval()


def save_tiny_vl(folder: Path, kind: str = "qwen3_vl", seed: int = 0) -> Path:
    """A whole model folder: weights, tokenizer, template, image processor."""
    make_vl_folder(folder)
    end_ids = list(PolicyTokenizer.load(str(folder)).end_of_turn_ids)
    model = tiny_vl_model(kind, seed)
    model.generation_config.eos_token_id = end_ids
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def full_vl_log_probs(
    model: PreTrainedModel, folder: Path, ids: Sequence[int], images: Sequence[bytes], temperature: float = 1.0
) -> torch.Tensor:
    """Log-prob of every id but the first, by one forward of transformers that finds the positions itself."""
    tokens = torch.tensor([list(ids)])
    pixels = ImageProcessor.load(folder).pixels(images) if images else {}
    kinds = (tokens == PAD).int()
    logits = model(input_ids=tokens, mm_token_type_ids=kinds, **pixels).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
