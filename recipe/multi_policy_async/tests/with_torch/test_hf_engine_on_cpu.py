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
"""The continuous-batching engine against single full forward passes, stepped by hand except where threads matter."""

import json
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.multi_policy_async.backends.cpu.generation_request import GenerationRequest, QueueFull
from recipe.multi_policy_async.backends.cpu.hf_engine import HFEngine
from recipe.multi_policy_async.backends.cpu.sampling import InvalidRequest, SamplingParams
from recipe.multi_policy_async.backends.cpu.weights import checksum_of, tensor_digest
from recipe.multi_policy_async.tests.fakes.tiny_model_folder import make_model_folder
from recipe.multi_policy_async.tests.hf_engine_driver import (
    MAX_LEN,
    assert_agrees,
    load,
    make_engine,
    run,
    submit,
)
from recipe.multi_policy_async.tests.tiny_qwen3 import VOCABULARY, tiny_qwen3
from recipe.multi_policy_async.trajectory import Version

pytestmark = pytest.mark.slow

TOKENS = st.integers(0, VOCABULARY - 1)
ARRIVAL = st.fixed_dictionaries(
    {
        "prompt": st.lists(TOKENS, min_size=1, max_size=40),
        "step": st.integers(0, 20),
        "length": st.integers(1, 40),
        "temperature": st.sampled_from([1.0, 0.7, 1.3]),
        "abort_after": st.none() | st.integers(0, 20),
    }
)


@given(arrivals=st.lists(ARRIVAL, min_size=1, max_size=14), repeat_first=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_log_probs_agree_with_a_full_forward_however_rows_join_leave_and_abort(arrivals, repeat_first):
    engine = make_engine(max_batch_size=5)
    if repeat_first:  # a group: the same prompt several times, in one step
        arrivals = arrivals[:1] * 4 + arrivals[1:]
    requests = []
    for step in range(200):
        for index, arrival in enumerate(arrivals):
            if arrival["step"] == step:
                request = submit(
                    engine,
                    str(index),
                    arrival["prompt"],
                    max_new_tokens=arrival["length"],
                    temperature=arrival["temperature"],
                )
                requests.append((request, arrival["abort_after"]))
        for request, abort_after in requests:
            if abort_after is not None and len(request.output_ids) >= abort_after:
                engine.abort(request.rid)
        engine.step()
        if len(requests) == len(arrivals) and all(request.finish_reason for request, _ in requests):
            break
    for request, abort_after in requests:
        assert request.finish_reason["type"] == (
            "length" if len(request.output_ids) == request.params.max_new_tokens else "abort"
        )
        assert len(request.log_probs) == len(request.output_ids)
        assert abort_after is not None or len(request.output_ids) == request.params.max_new_tokens
        if request.output_ids:
            assert_agrees(request)


def test_a_cache_that_grows_past_its_first_allocation_stays_right():
    engine = make_engine(max_model_len=250, max_batch_size=32)
    requests = [submit(engine, str(i), [i + 1] * (3 * i + 1), max_new_tokens=200 - 3 * i) for i in range(20)]
    run(engine, *requests)
    for request in requests:
        assert_agrees(request, tolerance=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "olmo2"])
def test_models_of_other_families_agree_with_their_full_forward_too(architecture):
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
        sliding_window=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    engine = make_engine(model)
    requests = [submit(engine, str(i), list(range(1, 2 + 5 * i)), temperature=0.9) for i in range(4)]
    run(engine, *requests)
    for request in requests:
        assert_agrees(request, model)


def test_generation_stops_at_a_stop_token_or_the_models_end_token_and_keeps_it():
    ask = {"temperature": 0, "max_new_tokens": 12}
    engine = make_engine()
    free = submit(engine, "free", [5, 6, 7], **ask)
    run(engine, free)
    stop = free.output_ids[4]
    expected = free.output_ids[: free.output_ids.index(stop) + 1]
    engine = make_engine(eos_token_ids=[stop])
    by_request = submit(engine, "request", [5, 6, 7], stop_token_ids=[stop], **ask)
    by_model = submit(engine, "model", [5, 6, 7], ignore_eos=False, **ask)
    ignoring = submit(engine, "ignoring", [5, 6, 7], **ask)
    run(engine, by_request, by_model, ignoring)
    for request in (by_request, by_model):
        assert request.output_ids == expected
        assert request.finish_reason == {"type": "stop", "matched": stop}
    assert ignoring.output_ids == free.output_ids
    assert ignoring.finish_reason == {"type": "length", "length": 12}


def test_a_budget_of_no_tokens_is_answered_with_none():
    request = submit(make_engine(), "none", [1], max_new_tokens=0)
    assert (request.output_ids, request.finish_reason["type"]) == ([], "length")


def test_an_aborted_request_resubmitted_with_its_partial_output_ends_as_if_never_cut():
    engine = make_engine()
    whole = submit(engine, "whole", [4, 4, 2], temperature=0, max_new_tokens=20)
    run(engine, whole)
    cut = submit(engine, "cut#1", [4, 4, 2], temperature=0, max_new_tokens=20)
    for _ in range(7):
        engine.step()
    assert engine.abort("cut#1")
    run(engine, cut)
    assert cut.finish_reason["type"] == "abort"
    assert len(cut.output_ids) == len(cut.log_probs) == 7
    rest = submit(engine, "cut#2", cut.prompt_ids + cut.output_ids, temperature=0, max_new_tokens=13)
    run(engine, rest)
    assert cut.output_ids + rest.output_ids == whole.output_ids


def test_an_abort_reaches_a_request_that_still_waits():
    engine = make_engine(max_batch_size=1)
    submit(engine, "runs", [1], max_new_tokens=50)
    waits = submit(engine, "waits", [2])
    engine.step()
    engine.abort("waits")
    engine.step()
    assert (waits.finish_reason["type"], waits.output_ids) == ("abort", [])
    assert not engine.abort("waits")


def test_a_pause_aborts_what_there_is_and_holds_what_comes():
    engine = make_engine()
    before = submit(engine, "before", [1], max_new_tokens=50)
    engine.step()
    engine.pause()
    after = submit(engine, "after", [2])
    for _ in range(3):
        engine.step()
    assert before.finish_reason["type"] == "abort"
    assert after.finish_reason is None
    assert engine.num_running == 0
    assert engine.resume()
    run(engine, after)


def test_an_engine_whose_version_was_never_set_does_not_resume():
    engine = make_engine(version=None)
    request = submit(engine, "early", [1])
    assert not engine.resume()
    engine.step()
    assert request.finish_reason is None
    engine.set_version(Version(0, 0))
    assert engine.resume()
    run(engine, request)


def test_every_answer_carries_the_version_whose_weights_sampled_it():
    """Invariant 5: the stamp is that of the engine, and it cannot race with a weight sync."""
    engine, other = make_engine(tiny_qwen3(1), version=Version(2, 7)), tiny_qwen3(2)
    old = submit(engine, "old", [1, 2, 3], max_new_tokens=30)
    engine.step()
    engine.step()
    engine.pause()
    held = submit(engine, "held", [1, 2, 3])
    engine.step()
    load(engine, other, Version(2, 8))
    assert engine.resume()
    run(engine, held)
    assert (old.version, held.version) == (Version(2, 7), Version(2, 8))
    assert_agrees(old, tiny_qwen3(1))
    assert_agrees(held, other)


def test_weights_and_version_do_not_change_under_running_rows():
    engine = make_engine()
    submit(engine, "runs", [1], max_new_tokens=50)
    engine.step()
    for change in (engine.begin_load, lambda: engine.set_version(Version(0, 2))):
        with pytest.raises(RuntimeError, match="while requests run"):
            change()


def test_half_a_load_gets_no_version_and_stays_paused():
    engine, other = make_engine(tiny_qwen3(1)), tiny_qwen3(2).state_dict()
    engine.pause()
    engine.begin_load()
    engine.weights.load("model.norm.weight", other["model.norm.weight"])
    with pytest.raises(ValueError, match="were not sent"):
        engine.weights.finish_load()
    with pytest.raises(RuntimeError, match="did not finish"):
        engine.set_version(Version(0, 2))
    assert not engine.resume()


@pytest.mark.parametrize(
    ("name", "shape", "message"), [("model.nothing", (1,), "not part"), ("model.norm.weight", (3,), "has shape")]
)
def test_a_weight_that_does_not_fit_is_refused_by_name(name, shape, message):
    engine = make_engine(tiny_qwen3(1), version=None)
    engine.begin_load()
    with pytest.raises(ValueError, match=message):
        engine.weights.load(name, torch.zeros(shape))


def test_the_served_checksum_is_that_of_the_sent_tensors_in_any_order():
    engine, sent = make_engine(tiny_qwen3(1), version=None), tiny_qwen3(2).state_dict()
    before = engine.weights.checksum()
    engine.begin_load()
    for name in reversed(list(sent)):
        engine.weights.load(name, sent[name])
    engine.weights.finish_load()
    assert engine.weights.checksum() != before
    assert engine.weights.checksum() == checksum_of({name: tensor_digest(sent[name]) for name in sent})


def test_a_tied_weight_is_complete_under_either_of_its_names():
    engine, sent = make_engine(tiny_qwen3(1), version=None), tiny_qwen3(2).state_dict()
    assert sent.pop("lm_head.weight") is not None
    engine.begin_load()
    for name, tensor in sent.items():
        engine.weights.load(name, tensor)
    engine.weights.finish_load()
    assert engine.weights.complete


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    engine = make_engine()
    first = submit(engine, "same", [1])
    with pytest.raises(InvalidRequest, match="duplicate"):
        submit(engine, "same", [1])
    run(engine, first)
    run(engine, submit(engine, "same", [1]))


def test_the_queue_of_waiting_requests_is_bounded():
    """Invariant 10."""
    engine = make_engine(max_waiting=3)
    waiting = [submit(engine, str(i), [1]) for i in range(3)]
    with pytest.raises(QueueFull):
        submit(engine, "one too many", [1])
    run(engine, *waiting)
    run(engine, submit(engine, "one too many", [1]))


def test_weights_that_are_not_finite_fail_the_request_instead_of_sampling_noise():
    model = tiny_qwen3(1)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine = make_engine(model)
    request = submit(engine, "nan", [1])
    run(engine, request)
    assert "not finite" in request.error
    assert request.output_ids == []


def test_weights_that_are_finite_again_leave_no_trace_of_those_that_were_not():
    bad, good = tiny_qwen3(1), tiny_qwen3(2)
    with torch.no_grad():
        bad.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    engine = make_engine(bad)
    run(engine, submit(engine, "nan", [1] * 60))
    engine.pause()
    load(engine, good, Version(0, 2))
    assert engine.resume()
    # The longer neighbour makes the short row's attention span places that the old row had filled.
    request = submit(engine, "good", [1, 2], max_new_tokens=20)
    run(engine, request, submit(engine, "longer", [3] * 30, max_new_tokens=20))
    assert_agrees(request, good)


def test_an_error_in_the_model_fails_its_rows_and_not_the_engine():
    model = tiny_qwen3(1)
    engine = make_engine(model)
    lost = submit(engine, "lost", [1, 2, 3])
    engine.step()
    handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    engine.step()
    handle.remove()
    assert "ZeroDivisionError" in lost.error
    later = submit(engine, "later", [1, 2, 3])
    run(engine, later)
    assert_agrees(later, model)


def test_a_model_with_sliding_windows_is_refused():
    model = tiny_qwen3(1)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        HFEngine(model, max_model_len=MAX_LEN, max_batch_size=2)


def test_the_thread_serves_submitters_from_many_threads_and_a_pause_waits_for_its_rows():
    engine = make_engine()
    engine.start(torch_threads=1)
    finished = threading.Semaphore(0)
    requests = [
        GenerationRequest(str(i), [i + 1], SamplingParams(80, ignore_eos=True), on_finish=lambda _: finished.release())
        for i in range(12)
    ]
    submitters = [threading.Thread(target=engine.submit, args=(request,)) for request in requests]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    engine.pause(timeout_s=10)
    assert engine.num_running == 0
    assert all(request.finish_reason for request in requests)
    for _ in requests:
        assert finished.acquire(timeout=10)
    for request in requests:
        if request.output_ids:
            assert_agrees(request)
    engine.stop()
    assert not engine.alive


def test_a_request_with_a_json_schema_answers_by_it_and_its_neighbour_as_ever(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_model_folder(tmp_path / "model") / "tokenizer.json"))
    end, size = tokenizer.token_to_id("<|im_end|>"), tokenizer.get_vocab_size()
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema = json.dumps({**schema, "additionalProperties": False})
    folder, prompt = str(tmp_path / "model"), tokenizer.encode("ok?").ids
    engine = make_engine(tiny_qwen3(vocabulary=size), eos_token_ids=[end], model_path=folder, max_model_len=64)
    alone, free = (submit(engine, rid, prompt, temperature=0) for rid in ("alone", "free"))
    run(engine, alone)
    bound = submit(engine, "bound", prompt, json_schema=schema, max_new_tokens=40, ignore_eos=False)
    again = submit(engine, "again", prompt, temperature=0)
    run(engine, free, bound, again)
    assert set(json.loads(tokenizer.decode(bound.output_ids))) == {"ok"}
    assert bound.finish_reason == {"type": "stop", "matched": end}
    assert all(-100 < log_prob <= 0 for log_prob in bound.log_probs)
    assert again.output_ids == alone.output_ids


@pytest.mark.parametrize(("schema", "message"), [('{"type": 3}', "json_schema"), ("{", "json_schema")])
def test_a_schema_that_cannot_be_followed_is_refused(tmp_path, schema, message):
    folder = make_model_folder(tmp_path / "model")
    engine = make_engine(tiny_qwen3(vocabulary=263), model_path=str(folder))
    with pytest.raises(InvalidRequest, match=message):
        submit(engine, "bad", [1], json_schema=schema)
