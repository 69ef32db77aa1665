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
"""The planner and the solver as nodes of a LangGraph graph, over langchain-openai.

The solver computes with a tool; what is needed to train both is their ``base_url``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph, add_messages
from langgraph.prebuilt import ToolNode, tools_condition

from recipe.multi_policy_async.assets.tiny_transcripts import ChainSum
from recipe.multi_policy_async.workflows.base import Outcome, Task
from recipe.multi_policy_async.workflows.planner_solver import judge


def calculate(expression: str) -> str:
    """Compute a sum, for example 3 + 5 - 2."""
    try:
        return str(ChainSum.parse(expression).value)
    except ValueError:
        return "not a sum"


class State(TypedDict):
    question: str
    plan: str
    messages: Annotated[list[AnyMessage], add_messages]  # of the solver and its tool


def chat_model(agent: Any) -> ChatOpenAI:
    """A chat model that is this agent's policy."""
    return ChatOpenAI(model=agent.model, base_url=agent.base_url, api_key="workflow")


class PlannerSolver:
    """Agents: ``planner``, ``solver``. The solver's final message is judged, its score is everybody's reward.

    Args:
        max_steps: of the graph; a solver that calls tools for ever fails.
    """

    def __init__(self, max_steps: int = 10):
        self._max_steps = max_steps

    async def run(self, task: Task, agents: Mapping[str, Any]) -> Outcome:
        planner, solver = chat_model(agents["planner"]), chat_model(agents["solver"]).bind_tools([calculate])

        async def plan(state: State) -> dict[str, Any]:
            answer = await planner.ainvoke([HumanMessage(state["question"])])
            return {"plan": answer.text, "messages": [HumanMessage(answer.text)]}

        async def solve(state: State) -> dict[str, Any]:
            return {"messages": [await solver.ainvoke(state["messages"])]}

        graph = StateGraph(State)
        graph.add_node("planner", plan)
        graph.add_node("solver", solve)
        graph.add_node("tools", ToolNode([calculate]))
        graph.add_edge(START, "planner")
        graph.add_edge("planner", "solver")
        graph.add_conditional_edges("solver", tools_condition)
        graph.add_edge("tools", "solver")
        end = await graph.compile().ainvoke({"question": task.question}, {"recursion_limit": self._max_steps})
        return await judge(task, end["messages"][-1].text, plan=end["plan"])
