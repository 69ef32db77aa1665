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
"""Content of the protocols' messages -> content as chat templates take it."""

from collections.abc import Callable, Mapping
from typing import Any

from .checks import array, mapping, string
from .errors import UnsupportedValue

Part = str | dict[str, Any]  # a text, or an image part (image_parts.py)
Readers = Mapping[str, Callable[[dict[str, Any], str], Part]]
"""How the parts of each type are read; their place, for faults, is the second argument."""


def text_part(part: dict[str, Any], at: str) -> str:
    return string(part.get("text"), f"{at}.text")


def refusal_part(part: dict[str, Any], at: str) -> str:
    return string(part.get("refusal"), f"{at}.refusal")


def lower_content(content: Any, where: str, readers: Readers) -> str | list[dict[str, Any]]:
    """A string, or parts of the types in ``readers``.

    Raises:
        BadRequest: it is neither, or has parts of other types.
    """
    if isinstance(content, str):
        return content
    return joined([lower_part(part, f"{where}[{index}]", readers) for index, part in enumerate(array(content, where))])


def lower_part(part: Any, at: str, readers: Readers) -> Part:
    """One part.

    Raises:
        BadRequest: it is malformed, or of another type.
    """
    kind = mapping(part, at).get("type")
    read = readers.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise UnsupportedValue(f"{at}: content of type {kind!r} is not supported here", param=at)
    return read(part, at)


def joined(parts: list[Part]) -> str | list[dict[str, Any]]:
    """Content for the template: one text, or parts where there are images among them."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
