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

import asyncio

import pytest

from recipe.multi_policy_async.tests.fakes.chat_agent import ChatAgent, chain_sum_task
from recipe.multi_policy_async.workflows.loader import load_workflow_class
from recipe.multi_policy_async.workflows.single_agent import SingleAgent

MESSAGES = [
    {"role": "system", "content": "Compute."},
    {"role": "user", "content": "3 plus {5}"},
]


def test_the_agent_is_asked_the_rows_messages_and_nothing_else() -> None:
    agent = ChatAgent("8")
    asyncio.run(SingleAgent().run(chain_sum_task(messages=MESSAGES), {"agent": agent}))
    assert agent.asked == [MESSAGES]


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "reward"), [("8", 1.0), ("9", 0.0), ("", 0.0)])
def test_the_reward_is_the_verifiers_score(reply: str, reward: float) -> None:
    outcome = asyncio.run(SingleAgent().run(chain_sum_task(scorer=None), {"agent": ChatAgent(reply)}))
    assert outcome.rewards == reward
    assert outcome.info == {"answer": reply}


def test_it_is_found_by_its_built_in_name() -> None:
    assert load_workflow_class("single_agent") is SingleAgent
