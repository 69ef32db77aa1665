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
"""How the CPU rollout server samples, and which requests it refuses."""

from collections import Counter

import pytest
import torch

from recipe.multi_policy_async.backends.cpu.sampling import InvalidRequest
from recipe.multi_policy_async.tests.hf_engine_driver import MAX_LEN, MODEL, assert_agrees, make_engine, run, submit
from recipe.multi_policy_async.tests.tiny_qwen3 import VOCABULARY, full_forward_log_probs

pytestmark = pytest.mark.slow


def test_greedy_takes_the_most_likely_token_and_reports_its_log_prob_at_temperature_one():
    engine = make_engine()
    request = submit(engine, "greedy", [5, 6, 7], temperature=0)
    submit(engine, "company", [1, 2], temperature=1.0)
    run(engine, request)
    logits = MODEL(input_ids=torch.tensor([[5, 6, 7] + request.output_ids])).logits[0, 2:-1]
    assert request.output_ids == logits.argmax(-1).tolist()
    expected = full_forward_log_probs(MODEL, [5, 6, 7], request.output_ids)
    assert request.log_probs == pytest.approx(expected, abs=1e-5)


def test_a_seeded_request_samples_the_same_tokens_alone_and_in_company():
    alone = submit(engine := make_engine(), "a", [3, 4], seed=11, max_new_tokens=20)
    run(engine, alone)
    engine = make_engine(seed=99)
    company = [submit(engine, f"c{i}", [i + 1] * 5, max_new_tokens=9) for i in range(3)]
    engine.step()
    again = submit(engine, "a", [3, 4], seed=11, max_new_tokens=20)
    run(engine, again, *company)
    assert again.output_ids == alone.output_ids


def test_requests_without_a_seed_do_not_repeat_each_other():
    engine = make_engine()
    group = [submit(engine, str(i), [3, 4, 5], max_new_tokens=12) for i in range(8)]
    run(engine, *group)
    assert len({tuple(request.output_ids) for request in group}) > 4


def test_sampled_frequencies_follow_the_distribution_whose_log_probs_are_reported():
    engine = make_engine(max_batch_size=64, seed=5)
    requests = [submit(engine, str(i), [9, 8], max_new_tokens=1, temperature=0.8) for i in range(2000)]
    run(engine, *requests)
    counts = Counter(request.output_ids[0] for request in requests)
    reported = {request.output_ids[0]: request.log_probs[0] for request in requests}
    for token, count in counts.most_common(5):
        probability = torch.tensor(reported[token]).exp().item()
        spread = (probability * (1 - probability) / 2000) ** 0.5
        assert abs(count / 2000 - probability) < 5 * spread


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 3}, 3), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1), ({"top_k": 5, "top_p": 1e-6}, 1)],
)
def test_filters_restrict_the_tokens_and_renormalise_their_log_probs(params, kept):
    engine = make_engine(max_batch_size=64)
    requests = [submit(engine, str(i), [9, 8], max_new_tokens=1, **params) for i in range(200)]
    run(engine, *requests)
    probs = torch.softmax(MODEL(input_ids=torch.tensor([[9, 8]])).logits[0, -1], -1)
    top, ids = probs.topk(kept)
    expected = dict(zip(ids.tolist(), (top / top.sum()).log().tolist(), strict=True))
    seen = {request.output_ids[0]: request.log_probs[0] for request in requests}
    assert set(seen) <= set(expected)
    for token, log_prob in seen.items():
        assert log_prob == pytest.approx(expected[token], abs=1e-5)


def test_a_filtered_row_does_not_change_the_log_probs_of_its_neighbours():
    engine = make_engine()
    plain = submit(engine, "plain", [1, 2, 3])
    run(engine, plain, submit(engine, "filtered", [1, 2, 3], top_k=2, temperature=0.5))
    assert_agrees(plain)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * MAX_LEN, {"max_new_tokens": 1}, "maximum context length"),
        ([1] * 10, {"max_new_tokens": MAX_LEN - 9}, "maximum context length"),
        ([VOCABULARY], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"temperature": -1}, "temperature"),
        ([1], {"top_p": 0}, "top_p"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_k": 1.5}, "wrong type"),
        ([1], {"stop": ["END"]}, "stop"),
        ([1], {"repetition_penalty": 1.2}, "repetition_penalty"),
        ([1], {"logit_bias": {"3": 1.0}}, "logit_bias"),
        ([1], {"json_schema": "{}"}, "json_schema"),
        ([1], {"json_schema": {}}, "wrong type"),
        ([1], {"beam": 2}, "unknown"),
    ],
)
def test_a_request_that_cannot_be_served_as_asked_is_refused(prompt, params, message):
    with pytest.raises(InvalidRequest, match=message):
        submit(make_engine(), "bad", prompt, **params)
