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
"""A model folder with an image processor, and images to send: all a gateway reads of a policy that takes images."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .tiny_model_folder import CHATML, make_model_folder

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, PAD, VIDEO = range(260, 264)  # their ids: after the bytes, a merge, and the special tokens of text
TEMPLATE = CHATML.replace(
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}",
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}",
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024},
}


def make_vl_folder(folder: Path, **config: Any) -> Path:
    """``make_model_folder`` with image tokens, a template that places them, and a processor of small patches.

    An image of 16 x 24 pixels takes 6 tokens, one of 16 x 16 takes 4.
    """
    make_model_folder(folder, template=TEMPLATE, special=IMAGE_TOKENS, merges=(("a", "b"),), **config)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "config.json").write_text(json.dumps({"image_token_id": PAD, "video_token_id": VIDEO}))
    return folder


def png(seed: int = 0, height: int = 16, width: int = 24) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shows(text: str, *images: bytes) -> dict[str, Any]:
    """A user's message in OpenAI's chat format: images, then text."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
