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
"""Prompts with images on the CPU rollout server: ids with one placeholder per image, and the images beside them."""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel

from ...vision import ImageProcessor, expand
from .sampling import InvalidRequest


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """What the model needs of a prompt besides its ids.

    Attributes:
        images: as they were sent; equal ids with other images are another prompt.
        pixels: ``pixel_values`` and ``image_grid_thw``.
        positions: of the prompt's tokens: text, time, height, width, ``[4, tokens]``.
        shift: what is added to a later token's place to give its position.
    """

    images: tuple[bytes, ...]
    pixels: dict[str, torch.Tensor]
    positions: torch.Tensor
    shift: int


class ImagePrompts:
    """Makes them for one model."""

    def __init__(self, processor: ImageProcessor, model: PreTrainedModel):
        self._processor = processor
        self._rope_index = model.base_model.get_rope_index

    def prepare(self, ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], ImagePrompt]:
        """Ids with the placeholders repeated, and the rest.

        Raises:
            InvalidRequest: an image cannot be read, or there are other images than placeholders.
        """
        try:
            pixels = self._processor.pixels(images)
            expanded = expand(ids, self._processor.placeholder, self._processor.tokens_of(pixels["image_grid_thw"]))
        except ValueError as error:
            raise InvalidRequest(f"image_data: {error}") from error
        if expanded[-1] == self._processor.placeholder:
            raise InvalidRequest("a prompt must not end in an image")
        tokens = torch.tensor([expanded])
        positions, shift = self._rope_index(
            tokens,
            mm_token_type_ids=(tokens == self._processor.placeholder).int(),
            image_grid_thw=pixels["image_grid_thw"],
            attention_mask=torch.ones_like(tokens),
        )
        positions = torch.cat([torch.arange(len(expanded))[None], positions[:, 0]])
        return expanded, ImagePrompt(tuple(images), pixels, positions, int(shift))


def image_bytes(image: Any) -> bytes:
    """An entry of ``image_data``: a data URL or base64 text, as SGLang takes them, or what verl's client sends.

    Raises:
        InvalidRequest: it is none of these; nothing is fetched or read from disk here.
    """
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise InvalidRequest("image_data must be a list of data URLs or base64 texts")
    try:
        return base64.b64decode(image.rpartition(",")[2] if image.startswith("data:") else image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"image_data: not valid base64: {error}") from error
