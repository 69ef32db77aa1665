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
"""Image parts of the protocols -> image parts of messages as chat templates take them.

An image part is ``{"type": "image", "image": <content>}``. Its content is a text, the digest of the image, which
carries the image: so histories with other images are other histories wherever messages are compared.
"""

import base64
import binascii
import hashlib
from typing import Any

from .checks import mapping, string
from .errors import BadRequest, UnsupportedValue

_BASE64 = ";base64"


class ImageContent(str):
    """An image that a client sent: the digest of its bytes, as text.

    Attributes:
        data: the encoded image.
        param: the request field that it came in.
        tokens: placeholders that it takes in a prompt; 0 until the model is known.
    """

    __slots__ = ("__weakref__", "data", "param", "tokens")

    def __new__(cls, data: bytes, param: str) -> "ImageContent":
        content = super().__new__(cls, hashlib.blake2b(data, digest_size=16).hexdigest())
        content.data, content.param, content.tokens = data, param, 0
        return content


class ImageUrl(str):
    """An image that is still to be fetched."""

    __slots__ = ("param",)

    def __new__(cls, url: str, param: str) -> "ImageUrl":
        content = super().__new__(cls, url)
        content.param = param
        return content


def image_part(content: ImageContent | ImageUrl) -> dict[str, Any]:
    return {"type": "image", "image": content}


def openai_image(part: dict[str, Any], at: str) -> dict[str, Any]:
    """Chat completions' ``{"type": "image_url", "image_url": {"url": ...}}``."""
    where = f"{at}.image_url"
    url = mapping(part.get("image_url"), where).get("url")
    return image_part(_from_url(string(url, f"{where}.url"), f"{where}.url"))


def responses_image(part: dict[str, Any], at: str) -> dict[str, Any]:
    """Responses' ``{"type": "input_image", "image_url": ...}``."""
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise UnsupportedValue(f"{at}.file_id is not supported: nothing is stored here", param=f"{at}.file_id")
    return image_part(_from_url(string(part.get("image_url"), f"{at}.image_url"), f"{at}.image_url"))


def anthropic_image(block: dict[str, Any], at: str) -> dict[str, Any]:
    """Messages' ``{"type": "image", "source": {"type": "base64", "data": ...}}``."""
    source = mapping(block.get("source"), f"{at}.source")
    kind = source.get("type")
    if kind == "base64":
        return image_part(_decoded(string(source.get("data"), f"{at}.source.data"), f"{at}.source.data"))
    if kind == "url":
        return image_part(_from_url(string(source.get("url"), f"{at}.source.url"), f"{at}.source.url"))
    raise UnsupportedValue(f"{at}.source.type must be 'base64' or 'url', got {kind!r}", param=f"{at}.source.type")


def _from_url(url: str, param: str) -> ImageContent | ImageUrl:
    if not url[:5].lower() == "data:":
        return ImageUrl(url, param)
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise BadRequest(f"{param} must be a data: URL in base64 (data:image/png;base64,...)", param=param)
    return _decoded(data, param)


def _decoded(data: str, param: str) -> ImageContent:
    try:
        return ImageContent(base64.b64decode(data, validate=True), param)
    except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
        raise BadRequest(f"{param} is not valid base64: {error}", param=param) from None
