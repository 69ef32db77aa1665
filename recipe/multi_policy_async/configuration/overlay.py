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
"""Merge the layers of one model's verl tree, remembering who set what and refusing keys verl does not have."""

import copy
from collections.abc import Iterator
from typing import Any

from .errors import Problem, did_you_mean

NUMBER_OR_TEXT = frozenset({"algorithm.rollout_correction.rollout_is_threshold"})
"""verl keys whose default is a number but which verl also reads as text."""


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of a tree; empty dicts and lists count as values."""
    for key, value in tree.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, dotted)
        else:
            yield dotted, value


def get(tree: dict[str, Any], dotted: str) -> Any:
    """The node at ``dotted``, or None where the path ends earlier."""
    node: Any = tree
    for part in dotted.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


class LayeredTree:
    """A verl tree built layer by layer.

    Attributes:
        tree: the merged tree, interpolations unresolved.
        origin: dotted leaf -> name of the last layer that set it; leaves nobody set are verl's defaults.
        problems: what the checked layers got wrong.
    """

    def __init__(self, defaults: dict[str, Any]):
        self.tree = defaults
        self.origin: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._schema: dict[str, Any] | None = None
        self._open = {dotted for dotted, value in leaves(defaults) if value is None or value == {}}

    def freeze_schema(self) -> None:
        """From now on only keys that exist are accepted; below nodes that verl leaves null or empty anything is."""
        self._schema = copy.deepcopy(self.tree)

    def apply(self, overlay: dict[str, Any], layer: str, written_at: str = "") -> None:
        """Merge ``overlay``; lists are replaced whole. ``written_at`` prefixes the keys in problems."""
        self._merge(self.tree, overlay, self._schema, layer, written_at, "")

    def set(self, dotted: str, value: Any, layer: str) -> None:
        """Set one key, unchecked, creating the nodes on the way."""
        overlay: Any = value
        for part in reversed(dotted.split(".")):
            overlay = {part: overlay}
        self._merge(self.tree, overlay, None, layer, "", "")

    def _merge(self, node: dict, overlay: dict, schema: dict | None, layer: str, at: str, path: str) -> None:
        for raw_key, value in overlay.items():
            key = str(raw_key)
            if key.startswith("+"):  # the user insists, as in Hydra: verl's dataclasses know more keys than its YAML
                key, sub_schema, unknown = key[1:], None, False
            else:
                unknown = schema is not None and key not in schema
                sub_schema = schema.get(key) if isinstance(schema, dict) else None
            dotted = f"{path}.{key}" if path else key
            shown = f"{at}.{dotted}" if at else dotted
            if unknown:
                self.problems.append(self._unknown(shown, key, schema, path))
                continue
            problem = _kind_problem(shown, dotted, sub_schema, value)
            if problem:
                self.problems.append(problem)
                continue
            if isinstance(value, dict):
                child = node.get(key)
                if not isinstance(child, dict):
                    child = node[key] = {}
                if not value:
                    self.origin[dotted] = layer
                open_below = not isinstance(sub_schema, dict) or not sub_schema or dotted in self._open
                self._merge(child, value, None if open_below else sub_schema, layer, at, dotted)
            else:
                node[key] = copy.deepcopy(value)
                self.origin[dotted] = layer

    def _unknown(self, shown: str, key: str, siblings: dict, path: str) -> Problem:
        fix = did_you_mean(key, siblings)
        if fix is None:
            elsewhere = [dotted for dotted, _ in leaves(self._schema or {}) if dotted.rpartition(".")[2] == key]
            if elsewhere:
                fix = "verl has this key at " + " or ".join(elsewhere[:3])
        names = sorted(map(str, siblings))
        allowed = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
        return Problem(shown, f"unknown key in {path or 'verl'}", allowed=None if fix else allowed, fix=fix)


def _kind_problem(shown: str, dotted: str, default: Any, value: Any) -> Problem | None:
    """A value of another kind than verl's default would only fail deep inside a worker: say so here."""
    interpolated = any(isinstance(side, str) and ("${" in side or side == "???") for side in (default, value))
    if default is None or default == {} or interpolated or (value is None and not isinstance(default, dict)):
        return None
    if isinstance(default, dict) != isinstance(value, dict):
        return Problem(shown, "is a section in verl" if isinstance(default, dict) else "is a value in verl", value)
    if isinstance(default, list) != isinstance(value, list):
        return Problem(shown, "must be a list" if isinstance(default, list) else "must not be a list", value)
    if isinstance(default, bool) != isinstance(value, bool):
        return Problem(shown, "must be true or false" if isinstance(default, bool) else "must not be a boolean", value)
    number = isinstance(default, int | float)
    if number and not isinstance(value, int | float) and dotted not in NUMBER_OR_TEXT:
        return Problem(shown, "must be a number", value)
    return None
