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
"""Types and bounds of the ``workflow`` and ``validation`` sections. Defaults live in ``config/``."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WorkflowSpec(BaseModel):
    """Which workflow runs, how many at once, and what happens when one fails."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Class: dotted path, a built-in name, or the class in ``path``."""
    path: str | None
    """A ``.py`` file or ``pkg://module``."""
    kwargs: dict[str, Any]
    """Arguments of the class."""
    n: int = Field(ge=1)
    """Workflows per task: the group size (verl's ``rollout.n``)."""
    timeout_s: float = Field(gt=0)
    """Deadline of one attempt; after it the workflow has failed, or is tried again if it is blocked on a policy."""
    max_concurrent: int = Field(ge=1)
    """Workflows running at once, not counting those that are blocked on a policy and hold one of its slots."""
    max_blocked_per_policy: int = Field(ge=0)
    """Workflows whose call waits at a policy's closed gate and that hold no common slot meanwhile."""
    blocked_after_s: float = Field(gt=0)
    """A call that waits for so long makes its workflow a blocked one."""
    max_attempts: int = Field(ge=1)
    """Attempts of a workflow whose gateway or policy was not there; its own errors are never tried again."""
    retry_wait_s: float = Field(ge=0)
    """Wait before the second attempt; doubled each time."""
    max_failures_in_a_row: int | None = Field(ge=1)
    """So many workflows failed by their own fault without one that went well: the driver gives up, naming the cause."""
    max_outage_s: float = Field(gt=0)
    """So long no workflow could end well because the gateway or a policy was not there: the driver gives up."""
    team_share: float | dict[str, float]
    """Share of the team's score in an agent's reward, unless one reward for all was given: one number for all agents,
    or numbers by agent id, where others have none. The gateway mixes it in, whoever gave the rewards."""
    dump_every: int = Field(ge=0)
    """Write every so many-th episode to the run directory; 0: none."""

    @model_validator(mode="after")
    def _shares_are_shares(self) -> "WorkflowSpec":
        shares = self.team_share.values() if isinstance(self.team_share, dict) else [self.team_share]
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"team_share must lie between 0 and 1, not {self.team_share}")
        return self


class ValidationSpec(BaseModel):
    """When the whole team is evaluated on the held-out tasks, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_updates: int = Field(ge=0)
    """Versions of whichever policy made most of them since the last evaluation began; 0: never on the way."""
    before_training: bool
    at_end: bool
    n: int = Field(ge=1)
    """Times that each task is played."""
    max_concurrent: int = Field(ge=1)
    """Workflows running at once, beside those of training."""
    pin: Literal["none", "hold_syncs"]
    """Whether policies publish versions while an evaluation runs."""
    timeout_s: float = Field(gt=0)
    """Longest evaluation; workflows that have not ended by then have failed."""

    @property
    def enabled(self) -> bool:
        """Whether the job evaluates at all."""
        return self.before_training or self.at_end or self.every_updates > 0
