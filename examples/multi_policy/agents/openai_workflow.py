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
"""The planner and the solver over the plain openai client, asynchronous and streamed, or synchronous.

The solver computes with a tool; what is needed to train both is their ``base_url``.
"""

import json
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import judge
from recipe.multi_policy_async.workflows.scoring import score_message

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute a sum, for example 3 + 5 - 2.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
MAX_TURNS = 5


def calculate(arguments: str) -> str:
    try:
        return str(ChainSum.parse(str(json.loads(arguments).get("expression"))).value)
    except (ValueError, AttributeError):
        return "not a sum"


def results(message: Any) -> list[dict[str, Any]]:
    """A message with tool calls and what the tool says to each, as history."""
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for c in message.tool_calls
    ]
    answers = [
        {"role": "tool", "tool_call_id": c.id, "content": calculate(c.function.arguments)} for c in message.tool_calls
    ]
    return [{"role": "assistant", "content": message.content, "tool_calls": calls}, *answers]


class StreamedPlannerSolver:
    """Agents: ``planner``, ``solver``. The solver's final message is judged, its score is everybody's reward."""

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        plan = (await self._ask(agents["planner"], [{"role": "user", "content": task.question}])).content or ""
        messages: list[dict[str, Any]] = [{"role": "user", "content": plan}]
        for _ in range(MAX_TURNS):
            answer = await self._ask(agents["solver"], messages, tools=[CALCULATE])
            if not answer.tool_calls:
                break
            messages += results(answer)
        return await judge(task, answer.content or "", plan=plan)

    async def _ask(self, agent: Any, messages: list[dict[str, Any]], **more: Any) -> Any:
        async with agent.client.chat.completions.stream(model=agent.model, messages=messages, **more) as stream:
            return (await stream.get_final_completion()).choices[0].message


class PlannerSolver:
    """The same with the synchronous client; the driver starts it in a thread of its own."""

    def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        plan = self._ask(agents["planner"], [{"role": "user", "content": task.question}]).content or ""
        messages: list[dict[str, Any]] = [{"role": "user", "content": plan}]
        for _ in range(MAX_TURNS):
            answer = self._ask(agents["solver"], messages, tools=[CALCULATE])
            if not answer.tool_calls:
                break
            messages += results(answer)
        return Outcome(score_message(task, answer.content or ""), info={"plan": plan})

    def _ask(self, agent: Any, messages: list[dict[str, Any]], **more: Any) -> Any:
        with OpenAI(base_url=agent.base_url, api_key="workflow") as client:
            completion = client.chat.completions.create(model=agent.model, messages=messages, **more)
        return completion.choices[0].message
