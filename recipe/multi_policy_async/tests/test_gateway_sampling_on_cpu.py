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
"""Who decides the sampling: the rollout config for a policy in training, the client otherwise."""

import asyncio

import openai
import pytest

from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import gateway_world

W = "e0-t0-s0-a0"
ASK = [{"role": "user", "content": "hello"}]
ROLLOUT = {"temperature": 0.8, "top_p": 0.95, "top_k": -1}
VAL = {"temperature": 0.3, "top_p": 1.0, "top_k": 20}
CLIENT = {"temperature": 0.1, "top_p": 0.5, "frequency_penalty": 0.5, "seed": 7}


def sent_and_rows(folder, texts, *, asked, purpose="train", trained=True, val=None, **spec):
    async def run():
        engines = {"planner_model": FakeEngine(texts.says("plan"))}
        bindings = {"planner_model": {"sampling": ROLLOUT, "eval_sampling": val or {}, "trained": trained}}
        mapping = {"planner": "planner_model"}
        async with gateway_world(folder, engines, mapping=mapping, bindings=bindings, **spec) as world:
            client = world.client((await world.open(W, purpose=purpose))["planner"])
            await client.chat.completions.create(model="m", messages=ASK, **asked)
            await world.control.finalize(W, rewards=1.0)
            counted = world.metric("sampling_overridden_total", model="planner_model", name="temperature")
            params = engines["planner_model"].requests[0]["sampling_params"]
            return {k: v for k, v in params.items() if k not in ("max_new_tokens", "stop_token_ids")}, world, counted

    params, world, counted = asyncio.run(run())
    params.pop("skip_special_tokens")
    return params, world.sink.rows, counted


def test_the_rollout_config_decides_for_a_policy_in_training_and_the_override_is_recorded(folder, texts):
    params, [row], counted = sent_and_rows(folder, texts, asked=CLIENT)
    assert params == {"temperature": 0.8, "top_p": 0.95}
    assert row.metadata["calls"][0]["sampling_overridden"] == CLIENT and counted == 1


def test_equal_values_are_no_override(folder, texts):
    _, [row], counted = sent_and_rows(folder, texts, asked={"temperature": 0.8, "presence_penalty": 0.0})
    assert row.metadata["calls"][0]["sampling_overridden"] == {} and counted == 0


@pytest.mark.parametrize("who", [{"purpose": "eval"}, {"trained": False}])
def test_the_client_decides_in_evaluation_and_for_frozen_policies(folder, texts, who):
    params, _, counted = sent_and_rows(folder, texts, asked=CLIENT, **who)
    assert params == {"temperature": 0.1, "top_p": 0.5, "frequency_penalty": 0.5, "sampling_seed": 7}
    assert counted == 0


def test_what_such_a_client_leaves_open_is_filled_from_the_rollout_config(folder, texts):
    params, _, _ = sent_and_rows(folder, texts, asked={"temperature": 0.0}, purpose="eval")
    assert params == {"temperature": 0.0, "top_p": 0.95}


@pytest.mark.parametrize("trained", [True, False])
def test_in_evaluation_the_val_kwargs_come_before_the_training_values_and_behind_the_clients(folder, texts, trained):
    params, _, _ = sent_and_rows(folder, texts, asked={}, purpose="eval", val=VAL, trained=trained)
    assert params == {"temperature": 0.3, "top_k": 20}
    params, _, _ = sent_and_rows(folder, texts, asked={"temperature": 0.0}, purpose="eval", val=VAL, trained=trained)
    assert params == {"temperature": 0.0, "top_k": 20}


def test_val_kwargs_change_nothing_in_training(folder, texts):
    params, _, _ = sent_and_rows(folder, texts, asked={}, val=VAL)
    assert params == {"temperature": 0.8, "top_p": 0.95}


def test_refuse_makes_another_value_a_400_and_lets_equal_ones_pass(folder, texts):
    with pytest.raises(openai.BadRequestError, match="temperature.*rollout config"):
        sent_and_rows(folder, texts, asked={"temperature": 0.1}, sampling="refuse")
    params, _, _ = sent_and_rows(folder, texts, asked={"temperature": 0.8}, sampling="refuse")
    assert params == {"temperature": 0.8, "top_p": 0.95}
