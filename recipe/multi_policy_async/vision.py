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
"""Images of a policy whose model folder has an image processor: how many tokens they take, and their pixels.

Shared by the gateway (tokens), the CPU rollout server and batch assembly (pixels). An image stands in a row as one
placeholder token repeated as often as the model has features for it; on its way to the servers it is a single
placeholder, which the server repeats by its own processor. Served are processors that cut an image into a grid of
patches (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V).

Importing this module imports neither torch nor transformers; ``ImageProcessor.load`` does where there is a processor.
"""

import io
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

logger = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Height and width of an encoded image, after decoding it once.

    Raises:
        ValueError: it cannot be decoded, or has more pixels.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        # PIL's readers raise errors of any type on damaged data.
        raise ValueError(f"it is none of {', '.join(FORMATS)} that can be read: {error}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, more than {max_pixels}")
    try:
        image.load()
    except Exception as error:
        raise ValueError(f"it cannot be decoded: {error}") from error
    return height, width


def decode(data: bytes) -> Image.Image:
    """An encoded image as processors take it.

    Raises:
        ValueError: it cannot be decoded.
    """
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
    except Exception as error:
        # As above: of any type.
        raise ValueError(f"an image cannot be decoded: {error}") from error


def collapse(ids: Sequence[int], placeholder: int) -> list[int]:
    """Each image's placeholders as one."""
    previous = [None, *ids[:-1]]
    return [token for token, before in zip(ids, previous, strict=True) if token != placeholder or before != token]


def expand(ids: Sequence[int], placeholder: int, counts: Iterable[int]) -> list[int]:
    """Each placeholder repeated as often as its image has tokens: the inverse of ``collapse``.

    Raises:
        ValueError: there are more or fewer placeholders than images.
    """
    counts = list(counts)
    found = ids.count(placeholder)
    if found != len(counts):
        raise ValueError(f"{found} image placeholders for {len(counts)} images")
    left = iter(counts)
    expanded: list[int] = []
    for token in ids:
        expanded += [token] * next(left) if token == placeholder else (token,)
    return expanded


class ImageProcessor:
    """The image processor of one model.

    Attributes:
        placeholder: id of the token that stands for a piece of an image.
        reserved: ids that mean something only where the processor put them: the policy must not sample them.
    """

    def __init__(self, processor: Any, placeholder: int, reserved: Iterable[int]) -> None:
        self._processor = processor
        self.placeholder = placeholder
        self.reserved = frozenset(reserved)

    @classmethod
    def load(cls, model_path: str | Path) -> "ImageProcessor | None":
        """Read a model folder; None when it takes no images, or images of a kind that is not served."""
        folder = Path(model_path)
        name = _processor_name(folder)
        if name is None or not (folder / "config.json").exists():
            return None
        placeholders = json.loads((folder / "config.json").read_text())
        processor = _load_processor(folder, name)
        if not hasattr(processor, "get_number_of_image_patches") or "image_token_id" not in placeholders:
            logger.warning("%s: images are not served for models with a %s", folder, name)
            return None
        reserved = [placeholders.get(key) for key in ("image_token_id", "video_token_id")]
        return cls(processor, placeholders["image_token_id"], [token for token in reserved if token is not None])

    def tokens(self, height: int, width: int) -> int:
        """Placeholders of an image of this size.

        Raises:
            ValueError: the processor refuses the size, such as a line of pixels.
        """
        patches = self._processor.get_number_of_image_patches(height, width, {})
        return patches // self._processor.merge_size**2

    def pixels(self, images: Iterable[bytes]) -> dict[str, Any]:
        """``pixel_values`` and ``image_grid_thw`` of encoded images, as the model's forward takes them."""
        return dict(self._processor([decode(data) for data in images], return_tensors="pt"))

    def tokens_of(self, grid: Any) -> list[int]:
        """Placeholders per image of an ``image_grid_thw``."""
        return [int(each.prod()) // self._processor.merge_size**2 for each in grid]


def _processor_name(folder: Path) -> str | None:
    """Class name of the folder's image processor."""
    for file in ("preprocessor_config.json", "processor_config.json"):
        if (folder / file).exists():
            config = json.loads((folder / file).read_text())
            name = config.get("image_processor", config).get("image_processor_type")
            if name is not None:
                return name
    return None


def _load_processor(folder: Path, name: str) -> Any:
    import transformers

    if transformers.utils.is_torchvision_available():
        return transformers.AutoImageProcessor.from_pretrained(folder)
    # Without torchvision the auto class cannot be used, but the class itself has a version on PIL.
    found = getattr(transformers, name.removesuffix("Fast"), None)
    return None if found is None else found.from_pretrained(folder)
