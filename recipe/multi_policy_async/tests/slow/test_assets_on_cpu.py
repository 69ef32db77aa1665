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
"""Models and tasks for machines without a hub: well-formed, reproducible, and built once."""

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from recipe.multi_policy_async.assets import prepare_models
from recipe.multi_policy_async.assets.prepare_models import (
    STAMP,
    TINY,
    TINY_TOOLS,
    Phase,
    TinyRecipe,
    prepare_tiny,
    stamped,
)
from recipe.multi_policy_async.assets.prepare_tasks import build_tasks, main, write_tasks
from recipe.multi_policy_async.assets.tiny_tool_user import SYSTEMS, tool_user_transcript
from recipe.multi_policy_async.assets.tiny_transcripts import ROLES, ChainSum, transcripts

pytestmark = pytest.mark.slow

MICRO = replace(
    TINY,
    shape={
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
    },
    batch_size=4,
    warm_starts={role: (Phase(steps=2, lr=1e-3, error_rate=0.0),) for role in ("planner", "solver")},
)
CHAIN_SUM = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def train_here(folder: Path, recipe: TinyRecipe) -> dict[str, float]:
    """As ``_train_roles``, without the processes: they would spend the test's seconds on imports."""
    return {role: prepare_models.train_role(folder / role, role, recipe, 1) for role in recipe.warm_starts}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prepare_models, "_train_roles", train_here)
    assert prepare_tiny(tmp_path / "models", MICRO)
    return tmp_path / "models"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = prepare_models.tiny_tokenizer(MICRO)
    prepare_models.save_tokenizer(trained, folder, 128)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_tiny_models_load_with_transformers_and_answer_a_chat_prompt(built: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built / "solver")
    model = AutoModelForCausalLM.from_pretrained(built / "solver")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 plus 5"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=3)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert model.config.model_type == "qwen3"
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_verls_qwen_continuous_token_builder_accepts_the_tokenizer(built: Path) -> None:
    continuous_token = pytest.importorskip("verl.utils.tokenizer.continuous_token")
    from transformers import AutoTokenizer

    continuous_token.QwenContinuousTokenBuilder(AutoTokenizer.from_pretrained(built / "planner"))


def test_a_chat_template_renders_the_transcripts_the_models_were_trained_on(built: Path) -> None:
    from transformers import AutoTokenizer

    from recipe.multi_policy_async.assets.tiny_model import encode

    transcript = next(transcripts("planner", CHAIN_SUM, 0, 0.0))
    prompt, reply = encode(Tokenizer.from_file(str(built / "planner" / "tokenizer.json")), transcript)
    messages = [{"role": "user", "content": transcript.prompt}, {"role": "assistant", "content": transcript.reply}]
    tokenizer = AutoTokenizer.from_pretrained(built / "planner")
    assert tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False) == prompt
    newline = tokenizer.encode("\n")
    assert tokenizer.apply_chat_template(messages, return_dict=False) == prompt + reply + newline


def test_the_same_recipe_builds_the_same_weights_and_another_seed_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_models, "_train_roles", train_here)
    solver_only = replace(MICRO, warm_starts={"solver": MICRO.warm_starts["solver"]})
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        prepare_tiny(tmp_path / name, replace(solver_only, seed=seed))
    first, again, other = (
        (tmp_path / name / "solver" / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_a_stamp_of_the_same_recipe_saves_the_build(built: Path) -> None:
    before = (built / "solver" / "model.safetensors").stat().st_mtime_ns
    assert not prepare_tiny(built, MICRO)
    assert (built / "solver" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("changed", [{"seed": 7}, {"batch_size": 5}, {"vocab_size": 300}])
def test_a_stamp_of_another_recipe_does_not_count(built: Path, changed: dict[str, int]) -> None:
    assert stamped(built, MICRO.digest(), MICRO.warm_starts)
    assert not stamped(built, replace(MICRO, **changed).digest(), MICRO.warm_starts)


def test_a_stamp_without_its_models_does_not_count(built: Path) -> None:
    (built / "planner" / "model.safetensors").unlink()
    assert not stamped(built, MICRO.digest(), MICRO.warm_starts)


def test_a_build_that_fails_leaves_no_stamp_and_no_half_built_folder(tmp_path: Path, monkeypatch) -> None:
    def fail(folder: Path, recipe: TinyRecipe) -> dict[str, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prepare_models, "_train_roles", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        prepare_tiny(tmp_path / "models", MICRO)
    assert list(tmp_path.iterdir()) == []


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_newline_is_one_token_and_so_is_every_digit(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("\n").ids) == 1
    assert len(tokenizer.encode("2026").ids) == 4


def test_prompts_and_replies_are_short(tokenizer: Tokenizer) -> None:
    for role, longest_reply in (("planner", 16), ("solver", 12), ("verifier", 12)):
        for transcript in islice(transcripts(role, TINY.tasks, 0, 0.5), 200):
            assert len(tokenizer.encode(transcript.prompt).ids) + 8 <= 64
            assert len(tokenizer.encode(transcript.reply).ids) + 1 <= longest_reply


@pytest.mark.parametrize("role", sorted(ROLES))
def test_transcripts_err_at_the_rate_asked_for_and_the_right_reply_stays_the_likeliest(role: str) -> None:
    chain, rng = ChainSum((3, 5), ("+",)), random.Random(0)
    correct = ROLES[role]("?", chain, rng, 0.0).reply
    replies = [ROLES[role]("?", chain, rng, 0.4).reply for _ in range(4000)]
    counts = {reply: replies.count(reply) for reply in set(replies)}
    assert abs(counts.pop(correct) / len(replies) - 0.6) < 0.03
    assert max(counts.values()) / len(replies) < 0.25


def test_the_tool_user_calls_its_tool_in_hermes_form_and_then_says_what_it_answered() -> None:
    from recipe.multi_policy_async.gateway.output_parsing import make_tool_family

    family, chain = make_tool_family("hermes", "", None), ChainSum((3, 5), ("-",))
    turns = [tool_user_transcript("?", chain, random.Random(seed), 0.0) for seed in range(20)]
    calls = [turn for turn in turns if "<tool_call>" in turn.reply]
    assert {turn.prompt for turn in calls} == {"3 minus 5"}
    [call] = family.parse(calls[0].reply, [], [])
    assert (call.name, json.loads(call.arguments)) == ("calculate", {"expression": "3 - 5"})
    answers = [turn for turn in turns if turn not in calls]
    assert {turn.reply for turn in answers} == {"-2"} and all(turn.prompt.endswith("tool\n-2") for turn in answers)
    assert {turn.system for turn in turns} == set(SYSTEMS)


def test_the_tool_models_have_a_recipe_of_their_own() -> None:
    assert set(TINY_TOOLS.warm_starts) == set(TINY_TOOLS.roles) == {"planner", "solver"}
    assert TINY_TOOLS.digest() != TINY.digest()


@given(st.lists(st.tuples(st.sampled_from("+-"), st.integers(-99, 99)), min_size=1, max_size=4), st.integers(-99, 99))
def test_a_misread_sum_differs_from_the_question(rest: list[tuple[str, int]], first: int) -> None:
    chain = ChainSum.parse(" ".join([str(first), *(f"{operator} {term}" for operator, term in rest)]))
    assert chain.misread(random.Random(0)) != chain


def test_a_sum_has_the_value_that_reasoning_gym_gives_it() -> None:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset("chain_sum", seed=1, size=200, **TINY.tasks):
        assert str(ChainSum.parse(entry["metadata"]["expression"]).value) == entry["answer"]


def test_training_and_validation_tasks_are_disjoint_and_validation_tasks_differ() -> None:
    train, val = build_tasks("chain_sum", {**CHAIN_SUM, "max_terms": 2}, train_size=300, val_size=40, seed=0)
    questions = [row["extra_info"]["question"] for row in val]
    assert len(train) == 300 and len(val) == len(set(questions)) == 40
    assert not {row["extra_info"]["question"] for row in train} & set(questions)


def test_tasks_are_decided_by_the_seed() -> None:
    first, again, other = (build_tasks("chain_sum", CHAIN_SUM, 50, 10, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_setting_with_too_few_questions_is_refused() -> None:
    with pytest.raises(ValueError, match="different questions"):
        build_tasks("chain_sum", {**CHAIN_SUM, "max_terms": 2}, train_size=10, val_size=500, seed=0)


def test_task_files_have_verls_columns_and_an_entry_that_the_verifier_scores(tmp_path: Path) -> None:
    import reasoning_gym

    write_tasks(tmp_path, "chain_sum", CHAIN_SUM, train_size=20, val_size=5, seed=0)
    for split, size in (("train", 20), ("val", 5)):
        rows = pd.read_parquet(tmp_path / f"{split}.parquet").to_dict("records")
        assert len(rows) == size
        row = rows[0]
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["data_source"] == "reasoning_gym/chain_sum"
        assert list(row["prompt"]) == [{"role": "user", "content": row["extra_info"]["question"]}]
        verifier = reasoning_gym.get_score_answer_fn("chain_sum")
        assert verifier(row["reward_model"]["ground_truth"], json.loads(row["extra_info"]["entry"])) == 1.0


def test_the_command_reads_settings_of_the_dataset(tmp_path: Path) -> None:
    settings = [f"--setting={name}={value}" for name, value in CHAIN_SUM.items()]
    main(["--dataset", "chain_sum", *settings, "--out", str(tmp_path), "--train-size", "8", "--val-size", "2"])
    rows = pd.read_parquet(tmp_path / "train.parquet").to_dict("records")
    assert all(json.loads(row["extra_info"]["entry"])["metadata"]["num_terms"] <= 3 for row in rows)


def test_the_stamp_tells_what_was_built(built: Path) -> None:
    stamp = json.loads((built / STAMP).read_text())
    assert stamp["digest"] == MICRO.digest()
    assert set(stamp["loss"]) == {"planner", "solver"}
