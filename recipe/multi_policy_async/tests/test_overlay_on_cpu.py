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
"""Layers of a verl tree: the last one wins, unknown keys never enter, everybody's settings are remembered."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from ..configuration.overlay import LayeredTree, get, leaves

KEYS = st.sampled_from("abcd")
SCALARS = st.integers(0, 9)
TREES = st.dictionaries(
    KEYS, st.recursive(SCALARS, lambda below: st.dictionaries(KEYS, below, min_size=1), max_leaves=8), min_size=1
)


def changed(tree: dict, data: st.DataObject) -> dict:
    """An overlay of the tree's own shape: some of its leaves, with other values."""
    overlay: dict = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            below = changed(value, data)
            if below:
                overlay[key] = below
        elif data.draw(st.booleans()):
            overlay[key] = data.draw(SCALARS)
    return overlay


@given(TREES, st.data())
def test_of_two_layers_the_last_that_sets_a_leaf_wins_and_is_named(defaults, data):
    first, second = changed(defaults, data), changed(defaults, data)
    layers = LayeredTree(copy.deepcopy(defaults))
    layers.freeze_schema()
    layers.apply(first, "first")
    layers.apply(second, "second")
    assert not layers.problems
    in_first, in_second = dict(leaves(first)), dict(leaves(second))
    for dotted, value in leaves(defaults):
        assert get(layers.tree, dotted) == in_second.get(dotted, in_first.get(dotted, value))
        named = "second" if dotted in in_second else "first" if dotted in in_first else None
        assert layers.origin.get(dotted) == named


@given(TREES, TREES)
def test_a_checked_layer_never_changes_which_keys_there_are(defaults, overlay):
    layers = LayeredTree(copy.deepcopy(defaults))
    layers.freeze_schema()
    layers.apply(overlay, "overlay")
    assert {dotted for dotted, _ in leaves(layers.tree)} == {dotted for dotted, _ in leaves(defaults)}
    refused = {problem.key for problem in layers.problems}
    for dotted, value in leaves(overlay):
        taken = get(layers.tree, dotted) == value
        assert taken or any(dotted == key or dotted.startswith(f"{key}.") for key in refused)


def test_a_list_is_replaced_whole():
    layers = LayeredTree({"logger": ["console", "wandb"]})
    layers.freeze_schema()
    layers.apply({"logger": ["file"]}, "mine")
    assert layers.tree == {"logger": ["file"]}


def test_an_overlay_is_not_shared_with_the_tree():
    overlay = {"a": {"b": [1]}}
    layers = LayeredTree({"a": {"b": [0]}})
    layers.apply(overlay, "mine")
    layers.tree["a"]["b"].append(2)
    assert overlay == {"a": {"b": [1]}}
