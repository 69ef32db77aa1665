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
"""The planner and the solver as agents of the OpenAI Agents SDK, over the responses API or chat completions.

The solver computes with a tool; what is needed to train both is a client with their ``base_url``.
"""

from collections.abc import Mapping
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool

from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import judge

MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


@function_tool
def calculate(expression: str) -> str:
    """Compute a sum, for example 3 + 5 - 2."""
    try:
        return str(ChainSum.parse(expression).value)
    except ValueError:
        return "not a sum"


class PlannerSolver:
    """Agents: ``planner``, ``solver``. The solver's final message is judged, its score is everybody's reward.

    Args:
        api: ``responses`` or ``chat``.
        max_turns: a solver that calls tools for ever fails.
    """

    def __init__(self, api: str = "responses", max_turns: int = 5):
        self._model = MODELS[api]
        self._max_turns = max_turns
        self._run = RunConfig(tracing_disabled=True)  # traces would go to OpenAI

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        planner = Agent("planner", model=self._model(agents["planner"].model, agents["planner"].client))
        solver = Agent("solver", model=self._model(agents["solver"].model, agents["solver"].client), tools=[calculate])
        plan = await Runner.run(planner, task.question, max_turns=1, run_config=self._run)
        answer = await Runner.run(solver, plan.final_output, max_turns=self._max_turns, run_config=self._run)
        return await judge(task, answer.final_output, plan=plan.final_output)
