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
"""Who decides how tokens are drawn.

The trainer rescales every log-prob of a model by one temperature, so for a policy in training the rollout config
decides; a client's other value is overridden and recorded, or refused. For frozen policies and in evaluation the
client decides, and the rollout config fills what it leaves open; in evaluation its ``val_kwargs`` come first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..gateway_binding_registry import ModelBinding
from .errors import UnsupportedValue

# Our names, and SGLang's, with the value that changes nothing.
NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(slots=True)
class SamplingDecision:
    """What is sent to the engine, and what the client asked for in vain.

    Attributes:
        params: SGLang sampling parameters, only those that are not neutral, always with ``temperature``.
        overridden: name -> the client's value that was not used.
        stateful: the engine holds state over the turn (penalties, seed): such a turn cannot be resumed elsewhere.
        constrained: sampled under a grammar: not a sample of the policy.
    """

    params: dict[str, Any]
    overridden: dict[str, Any] = field(default_factory=dict)
    stateful: bool = False
    constrained: bool = False

    def constrain(self, json_schema: str) -> None:
        """Sample under a schema, whose state the engine holds."""
        self.params["json_schema"] = json_schema
        self.stateful = self.constrained = True


def decide_sampling(
    binding: ModelBinding, asked: Mapping[str, Any], *, evaluation: bool, refuse: bool
) -> SamplingDecision:
    """Apply the rule above.

    Args:
        asked: what the client sent, by the names of ``NEUTRAL`` and ``seed``, ``logit_bias``.
        evaluation: the workflow's purpose is evaluation.
        refuse: ``gateway.sampling: refuse``.

    Raises:
        UnsupportedValue: ``refuse`` and the client asks a policy in training for another value, or it asks for a
            ``logit_bias`` where clients decide (no upstream carries it).
    """
    configured = {**binding.sampling, **binding.eval_sampling} if evaluation else binding.sampling
    rollout = {name: configured.get(name, neutral) for name, neutral in NEUTRAL.items()}
    client_decides = evaluation or not binding.trained
    if client_decides:
        if asked.get("logit_bias"):
            raise UnsupportedValue("logit_bias is not supported", param="logit_bias")
        values = {name: asked.get(name, value) for name, value in rollout.items()}
        overridden: dict[str, Any] = {}
    else:
        values = rollout
        overridden = {
            name: value
            for name, value in asked.items()
            if value is not None and value != rollout.get(name) and not (name == "logit_bias" and not value)
        }
        if overridden and refuse:
            raise UnsupportedValue(
                f"{sorted(overridden)} of {binding.model_id} are decided by its rollout config while it is in training "
                "(gateway.sampling: refuse)",
                param=sorted(overridden)[0],
            )
    params = {name: value for name, value in values.items() if value != NEUTRAL[name] or name == "temperature"}
    stateful = any(name in params for name in _PENALTIES)
    if client_decides and asked.get("seed") is not None:
        params["sampling_seed"] = asked["seed"]
        stateful = True
    return SamplingDecision(params=params, overridden=overridden, stateful=stateful)
