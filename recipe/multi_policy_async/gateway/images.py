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
"""The images of a request: checked, counted in tokens, and put into its prompt.

Ids of a prompt hold every image's placeholder as often as the image has tokens, as the engine computes and the trainer
needs them. What is sent holds one per image, next to the images: servers repeat it themselves. SGLang up to 0.5.12
decodes such a prompt to text and encodes that again, so it is sent to its servers only where this gives the same ids.
"""

import asyncio
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..vision import ImageProcessor, collapse, expand, read_size
from .budget import check_possible
from .call import Call
from .errors import BadRequest, UnsupportedValue
from .image_fetch import fetch_image
from .image_parts import ImageContent, ImageUrl
from .request import Message
from .spec import GatewaySpec

if TYPE_CHECKING:
    from .generation import ServedModel
    from .tokenizer import PolicyTokenizer


class ModelImages:
    """What one model makes of images.

    Args:
        processor: of its model folder.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        # An agent sends its images with every turn, and every sample of a task the same ones: each is held once.
        self._known: weakref.WeakValueDictionary[str, ImageContent] = weakref.WeakValueDictionary()

    async def take(self, image: ImageContent, spec: GatewaySpec) -> ImageContent:
        """The image as it is held here, with its number of tokens.

        Raises:
            BadRequest: too large, or no image that can be read.
        """
        digest = str(image)  # a text of its own: a key that is the value would hold it for ever
        known = self._known.get(digest)
        if known is None:
            _check_bytes(image, spec)
            try:
                image.tokens = self.processor.tokens(
                    *await asyncio.to_thread(read_size, image.data, spec.max_image_pixels)
                )
            except ValueError as error:
                raise BadRequest(f"{image.param}: the image is not usable: {error}", param=image.param) from None
            known = self._known.setdefault(digest, image)
        return known

    def expand(self, ids: list[int], images: list[ImageContent]) -> list[int]:
        """Ids with every placeholder repeated.

        Raises:
            BadRequest: the chat template did not write one placeholder per image.
        """
        try:
            return expand(ids, self.processor.placeholder, [image.tokens for image in images])
        except ValueError as error:
            message = f"the model's chat template does not place the images: {error}"
            raise BadRequest(message, param="messages") from None

    def collapse(self, ids: list[int]) -> list[int]:
        """Ids as servers take them: one placeholder per image."""
        return collapse(ids, self.processor.placeholder)

    def reserved(self, ids: list[int]) -> bool:
        """Whether ids, sampled or sent by a client, hold a token that only the processor may place."""
        return not self.processor.reserved.isdisjoint(ids)


def has_images(messages: list[Message]) -> bool:
    """Whether some message has an image: contents are texts, but for those."""
    for message in messages:  # every call comes here, and a loop is the fastest way to look
        if type(message["content"]) is list:
            return True
    return False


async def take_images(model: "ServedModel", messages: list[Message]) -> list[ImageContent]:
    """Check the images of messages, in their order; the messages hold them from now on as they are held here.

    Raises:
        BadRequest: the model takes no images, there are too many, or one of them is not usable.
    """
    images = model.tokenizer.images
    parts = list(_image_parts(messages))
    if images is None:
        param = parts[0]["image"].param
        raise UnsupportedValue(
            f"{param}: model {model.model_id} takes no images, its folder has no image processor that is served",
            param=param,
        )
    if len(parts) > model.spec.max_images:
        param = parts[model.spec.max_images]["image"].param
        raise BadRequest(f"{param}: a request may have {model.spec.max_images} images", param=param)
    for part in parts:
        if isinstance(part["image"], ImageUrl):
            part["image"] = ImageContent(await fetch_image(part["image"], model.spec), part["image"].param)
        part["image"] = await images.take(part["image"], model.spec)
    return [part["image"] for part in parts]


def place_images(model: "ServedModel", ids: list[int], images: list[ImageContent]) -> list[int]:
    """Put the images into the ids of a whole prompt.

    Raises:
        BadRequest: the template did not place them, there are too many ids, or the model's servers would read others.
    """
    check_possible(model.binding, len(ids) + _added_by(images))
    placed = model.tokenizer.images.expand(ids, images)
    if not can_send(model, placed):
        raise UnsupportedValue(
            "special tokens as text, or text that is not in the tokenizer's normal form, cannot stand in a request "
            "with images: the model's servers encode it again",
            param="messages",
        )
    return placed


def extend_with_images(
    model: "ServedModel", parent: Call, ids: list[int], images: list[ImageContent]
) -> list[int] | None:
    """Put the images that are new since ``parent`` into ids that begin with its prompt and answer.

    None where the model's servers would read other ids: the sampled ones need not be what their text encodes to.

    Raises:
        BadRequest: the template did not place the images, or there are too many ids.
    """
    length, new = len(parent.prompt_ids) + len(parent.ids), images[len(parent.prompt.images) :]
    check_possible(model.binding, len(ids) + _added_by(new))
    placed = ids[:length] + model.tokenizer.images.expand(ids[length:], new)
    return placed if can_send(model, placed) else None


def _added_by(images: list[ImageContent]) -> int:
    """Ids that images add to a prompt which has a placeholder for each."""
    return sum(image.tokens - 1 for image in images)


def can_send(model: "ServedModel", ids: list[int]) -> bool:
    """Whether the model's servers read ids with images as they are."""
    return model.binding.exact_image_prompts or _reads_back(model.tokenizer, ids)


def _reads_back(tokenizer: "PolicyTokenizer", ids: list[int]) -> bool:
    """Whether a server that decodes ids and encodes the text gets the same ids."""
    sent = tokenizer.images.collapse(ids)
    return tokenizer.encode(tokenizer.decode(sent, skip_special_tokens=False)) == sent


def _image_parts(messages: list[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if type(message["content"]) is list:
            yield from (part for part in message["content"] if part["type"] == "image")


def _check_bytes(image: ImageContent, spec: GatewaySpec) -> None:
    if len(image.data) > spec.max_image_bytes:
        raise BadRequest(
            f"{image.param}: the image has {len(image.data)} bytes, more than {spec.max_image_bytes}", param=image.param
        )
