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
"""Checks on fields of untrusted JSON bodies; every fault is a BadRequest that names the field."""

import math
import reprlib
from collections.abc import Callable
from typing import Any

import orjson

from .errors import BadRequest

# Templates, digests and encoders recurse; orjson would read ten times as deep as it writes.
MAX_DEPTH = 100

_SHOWN = 80
_SHORT = reprlib.Repr()  # what is wrong may be long; writing 8 MB out takes a fifth of a second
_SHORT.maxstring = _SHORT.maxother = _SHOWN


def parse_json(data: bytes | str) -> Any:
    """JSON from outside, nested at most ``MAX_DEPTH`` deep.

    Raises:
        ValueError: it is not JSON (lone surrogates and NaN are not), or nested deeper.
    """
    parsed = orjson.loads(data)
    brackets = (b"[", b"{") if isinstance(data, bytes) else ("[", "{")
    if sum(map(data.count, brackets)) > MAX_DEPTH and _deeper_than(MAX_DEPTH, parsed):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return parsed


def _deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit):
        items = (item for v in level for item in (v.values() if isinstance(v, dict) else v))
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def fault(param: str, expected: str, value: Any) -> BadRequest:
    """The error for a field of another type or out of its bounds."""
    shown = _SHORT.repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    return BadRequest(f"{param} must be {expected}, got {shown}", param=param)


def optional(body: dict[str, Any], name: str, check: Callable[[Any, str], Any], default: Any = None) -> Any:
    """A field after its check; the default where it is absent or null."""
    value = body.get(name)
    return default if value is None else check(value, name)


def number(value: Any, param: str, low: float, high: float) -> float:
    """A finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise fault(param, "a number", value)
    if not low <= value <= high:
        raise fault(param, f"between {low:g} and {high:g}", value)
    return float(value)


def integer(value: Any, param: str, low: int, high: int = 2**31 - 1) -> int:
    """A whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise fault(param, "an integer", value)
    if not low <= value <= high:
        raise fault(param, f"between {low} and {high}", value)
    return value


def boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise fault(param, "true or false", value)
    return value


def string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise fault(param, "a string", value)
    return value


def mapping(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fault(param, "an object", value)
    return value


def array(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise fault(param, "an array", value)
    return value
