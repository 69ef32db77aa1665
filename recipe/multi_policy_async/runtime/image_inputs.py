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
"""What a policy that takes images needs of a batch besides ids: pixels, and positions in three dimensions.

verl computes both in its agent loop (``agent_loop.py:_compute_multi_modal_inputs`` and ``_compute_position_ids``), at
the side of the rollout; here they are made where the batch is, since a row keeps its images as they were sent.
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ..trajectory import Trajectory
from ..vision import ImageProcessor


class ImageInputs:
    """Pixels and positions for one model.

    Args:
        processor: of the model's folder.
        config: of the model.
    """

    def __init__(self, processor: ImageProcessor, config: transformers.PretrainedConfig):
        self._processor = processor
        # As verl does it (utils/tokenizer/tokenizer.py:hf_processor): the methods need no more of the model than this.
        model_class = transformers.MODEL_MAPPING[type(config)]
        self.rope_model = types.SimpleNamespace(config=config)
        for name in ("get_rope_index", "get_vision_position_ids"):
            if hasattr(model_class, name):
                setattr(self.rope_model, name, types.MethodType(getattr(model_class, name), self.rope_model))

    @classmethod
    def load(cls, model_path: str) -> "ImageInputs | None":
        """Read a model folder; None when its model takes no images."""
        processor = ImageProcessor.load(model_path)
        return None if processor is None else cls(processor, transformers.AutoConfig.from_pretrained(model_path))

    def columns(
        self, rows: Sequence[Trajectory | None], attention_mask: torch.Tensor
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """``multi_modal_inputs`` and ``position_ids [B, 4, P + R]`` of a batch.

        Args:
            rows: what stands in the batch's rows; None: padding.
            attention_mask: ``[B, P + R]``, one run of ones per row.

        Raises:
            ValueError: a row's placeholders are not those of its images.
        """
        positions = torch.zeros(len(rows), 4, attention_mask.shape[1], dtype=torch.long)
        made: dict[tuple[bytes, ...], dict[str, Any]] = {(): {}}  # the rows of a group show the same images
        inputs = []
        for i, row in enumerate(rows):
            if row is None:
                inputs.append({})
                continue
            if row.images not in made:
                made[row.images] = self._pixels(row.images)
            inputs.append(dict(made[row.images]))
            positions[i, :, attention_mask[i].bool()] = self._positions(row, inputs[-1])
        return inputs, positions

    def _pixels(self, images: tuple[bytes, ...]) -> dict[str, Any]:
        inputs = self._processor.pixels(images)
        grid = inputs["image_grid_thw"]
        inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        return inputs

    def _positions(self, row: Trajectory, inputs: dict[str, Any]) -> torch.Tensor:
        """Of one row without padding: its text position, then time, height and width, ``[4, length]``."""
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]], dtype=torch.long)
        is_image = ids == self._processor.placeholder
        grid = inputs.get("image_grid_thw")
        wanted = 0 if grid is None else sum(self._processor.tokens_of(grid))
        if int(is_image.sum()) != wanted:
            raise ValueError(
                f"trajectory {row.trajectory_id} has {int(is_image.sum())} image placeholders, its "
                f"{len(row.images)} images take {wanted}"
            )
        vision, _ = self.rope_model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=is_image.int(),
            image_grid_thw=grid,
            attention_mask=torch.ones_like(ids),
        )
        return torch.cat([torch.arange(ids.shape[1])[None], vision[:, 0]])
