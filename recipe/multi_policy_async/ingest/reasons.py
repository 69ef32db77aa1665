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
"""The closed lists of fates that a trajectory row can have (invariant 3).

A row waits (its fate is null: its group is open, queued or taken) until it gets exactly one of these.
"""

TRAINED = "trained"
RECORDED = "recorded"  # rows of frozen policies

STALE = "stale"
SURPLUS = "surplus"
ROUND_OVER = "round_over"  # more than its policy's batches took (schedule: sync)
FILTERED = "filtered"
FAILED_WORKFLOW = "failed_workflow"
GROUP_TOO_SMALL = "group_too_small"
TRUNCATED = "truncated"
CONSTRAINED = "constrained"  # sampled under a grammar (gateway.constrained: exclude)
NON_FINITE = "non_finite"
ROLLED_BACK = "rolled_back"
RETIRED = "retired"
POISON = "poison"  # its trainers died with it, one after the other
DAMAGED = "damaged"  # what the ledger gives back is not what was written
SHUTDOWN = "shutdown"

DROP_REASONS = (
    STALE,
    SURPLUS,
    ROUND_OVER,
    FILTERED,
    FAILED_WORKFLOW,
    GROUP_TOO_SMALL,
    TRUNCATED,
    CONSTRAINED,
    NON_FINITE,
    ROLLED_BACK,
    RETIRED,
    POISON,
    DAMAGED,
    SHUTDOWN,
)
FATES = (TRAINED, RECORDED, *DROP_REASONS)

ABANDON_REASONS = ("client_gone", "superseded", "unchosen", "late", "failed_workflow", "policy_down", "shutdown")
"""Why sampled tokens never became a row. The gateway counts them so; the ledger has those of superseded attempts."""


def check_drop_reason(reason: str) -> str:
    """Return ``reason`` if it is in the closed list.

    Raises:
        ValueError: it is not.
    """
    if reason not in DROP_REASONS:
        raise ValueError(f"drop reason {reason!r} is not one of {', '.join(DROP_REASONS)}")
    return reason
