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
"""Which agent talks to which model. Nothing here ever falls back to a default model."""

import re
from collections.abc import Iterable, Mapping

_AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class UnknownAgent(LookupError):
    """An agent id that the job's ``agent_model_mapping`` does not name."""

    def __init__(self, agent_id: str, known: Iterable[str]) -> None:
        self.agent_id = agent_id
        self.known = sorted(known)
        super().__init__(f"unknown agent {agent_id!r}; this job has {self.known}")


class AgentModelRouteTable:
    """Agent id -> model id, checked once at the start of the job.

    Args:
        mapping: agent id -> model id; several agents may share one model.
        models: ids of the models of this job.

    Raises:
        ValueError: the mapping is empty, or holds an agent id that cannot stand in a URL or a model id the job
            does not have; all faults are listed at once.
    """

    def __init__(self, mapping: Mapping[str, str], models: Iterable[str]) -> None:
        known_models = set(models)
        faults = [f"agent id {a!r} must match {_AGENT_ID.pattern}" for a in mapping if not _AGENT_ID.fullmatch(a)]
        faults += [
            f"agent {agent!r} is mapped to unknown model {model!r}; this job has {sorted(known_models)}"
            for agent, model in mapping.items()
            if model not in known_models
        ]
        if not mapping:
            faults.append("agent_model_mapping is empty: no agent can reach a model")
        if faults:
            raise ValueError("; ".join(faults))
        self._mapping = dict(mapping)

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._mapping)

    @property
    def models(self) -> frozenset[str]:
        """Models that at least one agent reaches."""
        return frozenset(self._mapping.values())

    def model_id(self, agent_id: str) -> str:
        """The model that serves ``agent_id``.

        Raises:
            UnknownAgent: the job does not map this agent.
        """
        try:
            return self._mapping[agent_id]
        except KeyError:
            raise UnknownAgent(agent_id, self._mapping) from None
