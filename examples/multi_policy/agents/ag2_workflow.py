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
"""The planner and the solver as AG2 agents (AG2 is the maintained successor of AutoGen).

The solver computes with a tool; what is needed to train both is their ``base_url``.
"""

from collections.abc import Mapping
from typing import Any

from ag2 import Agent, tool
from ag2.config import OpenAIConfig

from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import judge


@tool
def calculate(expression: str) -> str:
    """Compute a sum, for example 3 + 5 - 2."""
    try:
        return str(ChainSum.parse(expression).value)
    except ValueError:
        return "not a sum"


def config(agent: Any) -> OpenAIConfig:
    """The model of this agent."""
    return OpenAIConfig(model=agent.model, base_url=agent.base_url, api_key="workflow")


class PlannerSolver:
    """Agents: ``planner``, ``solver``. The solver's final message is judged, its score is everybody's reward."""

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        planner = Agent("planner", config=config(agents["planner"]))
        solver = Agent("solver", config=config(agents["solver"]), tools=[calculate])
        plan = (await planner.ask(task.question)).body or ""
        answer = await solver.ask(plan)
        return await judge(task, answer.body or "", plan=plan)
