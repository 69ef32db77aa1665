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
"""The workflow that is simulated: agents in the order of the policies, each with its number of turns."""

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

from ..workflows.base import Task
from .scenario import Scenario


class SimulatedFailure(RuntimeError):
    """A workflow that was to fail."""


class SimulatedWorkflow:
    """Calls agents through their OpenAI clients; the turns of one agent are one conversation.

    Args:
        scenario: how often each agent is called, how many workflows fail.
    """

    def __init__(self, scenario: Scenario):
        self._spec = scenario.simulation
        self._policies = scenario.policies
        self._random = random.Random(f"{self._spec.seed}/workflows")

    async def run(self, task: Task, agents: Any) -> Mapping[str, float] | float:
        rewards: dict[str, float] = {}
        for agent_id, turns in self._turns(task).items():
            messages = [{"role": "user", "content": task.question}]
            for _ in range(turns):
                answer = await agents[agent_id].chat(messages)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
            if turns:
                rewards[agent_id] = self._random.random()
        await asyncio.sleep(self._spec.other_s)
        if self._random.random() < self._spec.fail_share:
            raise SimulatedFailure("this workflow was to fail")
        return rewards or 0.0  # of a workflow that called nobody

    def _turns(self, task: Task) -> Mapping[str, int]:
        turns = {}
        for name, policy in self._policies.items():
            whole, part = divmod(policy.calls_per_workflow, 1)
            by_task = random.Random(f"{self._spec.seed}/{name}/{task.index}")
            draw = (by_task if policy.optional_by == "task" else self._random).random()
            turns[name] = int(whole) + (draw < part)
        return turns


class TaskList:
    """Any iterable of rows as the driver's dataset."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        return Task(index, self._rows[index])


def simulated_tasks(count: int) -> TaskList:
    """``count`` tasks that say no more than their number."""
    return TaskList({"prompt": [{"role": "user", "content": f"task {index}"}]} for index in range(count))
