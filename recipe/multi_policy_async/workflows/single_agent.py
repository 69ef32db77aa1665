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
"""One agent, one call: the dataset's prompt as it is. What verl's ``single_turn_agent`` does, through the gateway."""

from collections.abc import Mapping
from typing import Any

from .base import Outcome, Task
from .planner_solver import judge


class SingleAgent:
    """The model is asked the row's messages; the verifier's score of its answer is the reward.

    Agents: ``agent``.
    """

    agents: tuple[str, ...] = ("agent",)

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        """Play one episode; see ``planner_solver.PlannerSolver.run``."""
        return await judge(task, await agents["agent"].chat(task.prompt))
