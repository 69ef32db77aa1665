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
"""Types and bounds of the data path's configuration. Defaults live in ``config/ingest`` and ``config/queue``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StaggerSpec(_Spec):
    """Whether policies sync their weights one after the other (ingest/stagger.py)."""

    max_wait_s: float = Field(ge=0)
    """Longest wait for another policy's sync, per version, in seconds. 0: policies do not wait for each other."""


class IngestSpec(_Spec):
    """What holds for all policies of a job."""

    synchronous: Literal["normal", "full"]
    """SQLite's durability: ``normal`` survives a crash of any process, ``full`` a power loss too."""
    admission: Literal["any", "all"]
    """Admit a task while any (or only while all) of the policies that can train now are below their lead."""
    schedule: Literal["all", "alternate", "sync"]
    """Who trains when (ingest/schedule.py)."""
    alternate_versions: int = Field(ge=1)
    """Versions that one policy trains before the next has its turn, with ``schedule: alternate``."""
    on_failed: Literal["drop", "keep"]
    """Rows of failed workflows: dropped as ``failed_workflow``, or trained if they carry a reward."""
    on_truncated: Literal["drop", "keep"]
    """Rows with a turn that was cut at the length limit: dropped as ``truncated``, or trained."""
    max_give_backs: int = Field(ge=0)
    """A group that more trainers than this died with is dropped as ``poison``."""
    prune_every_s: float = Field(gt=0)
    """Delete rows that no checkpoint can need again this often, in seconds, if anything was written since."""
    stagger: StaggerSpec
    poll_s: float = Field(gt=0)
    """Longest wait of one long-poll call, in seconds."""


class ReplaySpec(_Spec):
    """Whether trained groups fill up batches that stay too small (ingest/replay.py)."""

    max_uses: int = Field(ge=1)
    """Batches that a row is in at most, in the lineage of the surviving weights. 1: no replay."""
    max_age: int = Field(ge=1)
    """Version before the step minus oldest version of a token, of replayed groups; ``max_staleness`` holds too."""
    max_share: float = Field(gt=0, lt=1)
    """Largest share of replayed groups in a batch."""


class QueueSpec(_Spec):
    """One policy's training queue. Sizes count advantage groups."""

    max_lead_groups: int | None = Field(ge=1)
    """How far production may run ahead. ``None``: the runtime derives it as verl does
    (``fully_async_rollouter.py:set_max_required_samples``)."""
    max_queue_groups: int | None = Field(ge=1)
    """Closed groups kept; the oldest ones above it are dropped as ``surplus``. ``None``: ``max_lead_groups``, and what
    the task that closes last brings beyond it: it was started below the lead."""
    max_staleness: int | None = Field(ge=0)
    """Version before the step minus oldest version of a token in the group (invariant 6). ``None``: unbounded. Rounds
    (``schedule: sync``) are on policy all the same."""
    on_stale: Literal["drop", "hold"]
    """``drop`` stale groups; ``hold``: also wait with a batch for groups in play that would be stale (holding.py)."""
    start_after_tasks: int = Field(ge=0)
    """The policy begins to train when so many tasks are over."""
    idle_tasks_limit: int | None = Field(ge=1)
    """So many tasks in a row gave a policy that can train no group: the job gives up. ``None``: never."""
    min_group_size: int = Field(ge=1)
    """Groups with fewer rows are small; GRPO would give a group of one its raw reward. Rows count, not workflows: they
    are what the estimator compares, and one workflow may leave several."""
    on_small_group: Literal["drop", "ema"]
    """Rows of small groups: dropped as ``group_too_small``, or compared with a moving average of their agent's rewards
    (baselines.py)."""
    ema_decay: float = Field(gt=0, lt=1)
    """What that average keeps of itself at each reward, once it has seen a few."""
    filter_equal_rewards: bool
    """Drop groups whose members all have the same reward as ``filtered``: they have no advantage (DAPO's dynamic
    sampling, arXiv:2503.14476)."""
    group_by: Literal["task_agent", "task_agent_turn", "task"]
    min_batch_groups: int | None = Field(ge=1)
    """Train on as few groups as this once the oldest has waited ``coalesce_s``. ``None``: only full batches."""
    max_batch_groups: int | None = Field(ge=1)
    """Take up to this many groups if they wait already. ``None``: the target size."""
    coalesce_s: float = Field(ge=0)
    """How long the oldest group waits for a full batch, where smaller ones or replay are allowed."""
    replay: ReplaySpec

    @model_validator(mode="after")
    def _fits_together(self) -> "QueueSpec":
        if self.on_stale == "hold" and self.max_staleness is None:
            raise ValueError("on_stale: hold needs a bound: set max_staleness")
        if self.on_small_group == "ema" and self.min_group_size == 1:
            raise ValueError("on_small_group: ema has no small groups while min_group_size is 1")
        if self.min_batch_groups and self.max_batch_groups and self.min_batch_groups > self.max_batch_groups:
            raise ValueError(
                f"min_batch_groups {self.min_batch_groups} is above max_batch_groups {self.max_batch_groups}"
            )
        return self
