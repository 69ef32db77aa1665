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
"""The planner and the solver over Anthropic's messages API.

The solver computes with a tool; what is needed to train both is their ``anthropic_base_url``.
"""

from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic

from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import judge

CALCULATE = {
    "name": "calculate",
    "description": "Compute a sum, for example 3 + 5 - 2.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def calculate(expression: str = "") -> str:
    try:
        return str(ChainSum.parse(expression).value)
    except ValueError:
        return "not a sum"


class PlannerSolver:
    """Agents: ``planner``, ``solver``. The solver's final message is judged, its score is everybody's reward.

    Args:
        max_tokens: of one message.
        max_turns: a solver that calls tools for ever ends with what it last said.
    """

    def __init__(self, max_tokens: int = 64, max_turns: int = 5):
        self._max_tokens = max_tokens
        self._max_turns = max_turns

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        plan = text_of(await self._ask(agents["planner"], [{"role": "user", "content": task.question}]))
        messages: list[dict[str, Any]] = [{"role": "user", "content": plan}]
        for _ in range(self._max_turns):
            answer = await self._ask(agents["solver"], messages, tools=[CALCULATE])
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": calculate(str(call.input.get("expression")))}
                for call in calls
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        return await judge(task, text_of(answer), plan=plan)

    async def _ask(self, agent: Any, messages: list[dict[str, Any]], **more: Any) -> Any:
        async with AsyncAnthropic(base_url=agent.anthropic_base_url, api_key="workflow") as client:
            return await client.messages.create(
                model=agent.model, messages=messages, max_tokens=self._max_tokens, **more
            )


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
