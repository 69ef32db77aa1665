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
"""Row payloads: what the engine sampled comes back bit by bit (invariant 1)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from recipe.multi_policy_async.ingest.row_codec import decode_arrays, encode_arrays, without_metadata
from recipe.multi_policy_async.tests.fakes.workflow_records import trajectory

INT = {"min_value": -(2**31), "max_value": 2**31 - 1}


@st.composite
def trajectories(draw):
    length = draw(st.integers(1, 70))

    def array(dtype, elements):
        return draw(arrays.arrays(dtype, length, elements=elements))

    return trajectory(
        "e0-t0-s0-a0",
        prompt_ids=draw(arrays.arrays(np.int32, st.integers(1, 40), elements=st.integers(**INT))),
        response_ids=array(np.int32, st.integers(**INT)),
        response_mask=array(np.uint8, st.integers(0, 1)),
        log_probs=array(np.float32, st.floats(width=32, allow_nan=True)),
        versions=array(np.int32, st.integers(-1, 3)),
        metadata=draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)),
    )


@given(trajectories())
@settings(max_examples=100, deadline=None)
def test_any_row_is_read_back_exactly(row):
    back = decode_arrays(encode_arrays(row))
    for name in ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions"):
        sent, got = getattr(row, name), back[name]
        assert got.dtype == sent.dtype and got.tobytes() == sent.tobytes(), name
    assert back["metadata"] == row.metadata


@given(trajectories(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_payload_that_was_cut_is_refused(row, data):
    body = encode_arrays(row)
    with pytest.raises(ValueError, match="payload"):
        decode_arrays(body[: data.draw(st.integers(0, len(body) - 1))])


@given(trajectories(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_payload_in_which_a_single_bit_is_another_one_is_refused(row, data):
    body = bytearray(encode_arrays(row))
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="is not what was written"):
        decode_arrays(bytes(body))


@given(trajectories(), st.data())
@settings(max_examples=50, deadline=None)
def test_what_tells_rows_apart_does_not_depend_on_their_metadata(row, data):
    other = replace(row, metadata={"seconds": data.draw(st.floats(0, 9))})
    changed = replace(row, response_ids=row.response_ids ^ 1)
    kept, same, different = (without_metadata(encode_arrays(each)) for each in (row, other, changed))
    assert kept == same != different


def test_metadata_with_numpy_values_and_strange_objects_costs_no_row():
    row = trajectory(
        "e0-t0-s0-a0", metadata={"seconds": np.float32(0.5), "ids": np.arange(2), "error": ValueError("x")}
    )
    assert decode_arrays(encode_arrays(row))["metadata"] == {"seconds": 0.5, "ids": [0, 1], "error": "x"}


def test_a_row_of_one_version_takes_about_eight_bytes_per_response_token():
    n = 4096
    row = trajectory(
        "e0-t0-s0-a0",
        response_ids=np.arange(n, dtype=np.int32),
        response_mask=np.ones(n, dtype=np.uint8),
        log_probs=np.full(n, -1.5, dtype=np.float32),
        versions=np.full(n, 3, dtype=np.int32),
    )
    assert len(encode_arrays(row)) < 8.2 * n
