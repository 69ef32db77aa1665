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
"""A workflow that spends most of its time outside of its models, as one with a slow tool or environment does."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import PlannerSolver, ask, judge


class SlowTool(PlannerSolver):
    """The planner's message goes through a tool before the solver gets it: the tool only takes time, and no CPU.

    Args:
        tool_s: its mean duration in seconds.
        spread: durations are uniform between (1 - spread) and (1 + spread) times the mean.
        others: as for ``PlannerSolver``.
    """

    def __init__(self, tool_s: float = 4.0, spread: float = 0.5, **others: Any):
        if tool_s < 0 or not 0 <= spread <= 1:
            raise ValueError(f"tool_s is {tool_s} and spread {spread}: not a duration and a share")
        super().__init__(**others)
        self._shortest, self._longest = (1 - spread) * tool_s, (1 + spread) * tool_s

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        plan = await ask(agents["planner"], self._planner_prompt, self._planner_examples, question=task.question)
        await asyncio.sleep(random.uniform(self._shortest, self._longest))
        message = await ask(agents["solver"], self._solver_prompt, self._solver_examples, plan=plan)
        return await judge(task, message, plan=plan)
