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
"""Reasoning, text and tool calls of an answer: the same however it comes in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..gateway.output_parsing import THINK, OutputParser, make_tool_family

HERMES = make_tool_family("hermes", "", None)
WORDS = ["<think>", "</think>", "\n", "\n\n", " ", "hm", "<", "so", '<tool_call>\n{"name": "add"}\n</tool_call>']


def read(pieces, thinking=False):
    parser = OutputParser(HERMES, [], THINK, thinking=thinking)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish([])]
    calls = [(call.name, call.arguments) for part in parts for call in part.tool_calls]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


@given(st.lists(st.sampled_from(WORDS), max_size=12), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_an_answer_is_read_in_any_pieces_as_it_is_read_whole(words, cuts, thinking):
    text = "".join(words)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]
    whole = read([text], thinking)
    assert read(pieces, thinking) == read(list(text), thinking) == whole


@pytest.mark.parametrize("pieces", [["<think>\nhm</think>\n\nyes"], ["<think>", "\n", "hm", "</think>", "\n\n", "yes"]])
def test_new_lines_behind_the_marks_of_reasoning_are_not_shown(pieces):
    assert read(pieces) == ("hm", "yes", [])
