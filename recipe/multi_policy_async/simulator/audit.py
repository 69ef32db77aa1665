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
"""Nothing lost, nothing twice: what engines sampled, what reached the ledger and what was trained, compared by id.

    engine emissions --> terminal records --> ledger rows --> batches of the trainers
          '------ token by token ----'            '--- by id ---'

Every fault is kept with its id, not raised: a simulation goes on, and its report lists them.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..ingest.batch_source import TakenBatch
from ..ingest.ledger_report import open_ledger
from ..ingest.reasons import FAILED_WORKFLOW, NON_FINITE, RECORDED, SHUTDOWN, TRAINED, TRUNCATED
from ..ingest.spec import QueueSpec
from ..trajectory import Trajectory, Version, WorkflowRecord
from .engine import SimulatedEngine, log_prob_of

_BY_ROW = (RECORDED, FAILED_WORKFLOW, NON_FINITE, TRUNCATED, SHUTDOWN)  # fates that members of a group may not share


class Audit:
    """Watches one simulation.

    Args:
        engines: the policies' servers, which know what they sampled.
        queues: the policies' bounds on staleness and on the batches that a row is in.
    """

    def __init__(self, engines: Mapping[str, SimulatedEngine], queues: Mapping[str, QueueSpec]):
        self.faults: list[str] = []
        self._engines = engines
        self._queues = queues
        self._ended: dict[str, str] = {}  # workflow id -> status
        self._rows: dict[str, tuple[str, ...]] = {}  # trajectory id -> its calls
        self._trained: defaultdict[str, list[Version]] = defaultdict(list)

    def ended(self, record: WorkflowRecord) -> None:
        """A terminal record was accepted."""
        if record.workflow_id in self._ended:
            return  # handed in again, which is allowed
        self._ended[record.workflow_id] = record.status
        for row in record.trajectories:
            self._rows[row.trajectory_id] = tuple(call["request_id"] for call in row.metadata["calls"])
            self._compare("recorded", row)

    def taken(self, model_id: str, version: Version, batch: TakenBatch) -> None:
        """A trainer at ``version`` trains a batch."""
        bound, max_uses = self._queues[model_id].max_staleness, self._queues[model_id].replay.max_uses
        for row, uses in ((row, group.uses) for group in batch.groups for row in group.trajectories):
            where = f"row {row.trajectory_id}"
            if row.model_id != model_id:
                self.faults.append(f"{where} of {row.model_id} is trained by {model_id}")
            before = self._trained[row.trajectory_id]
            if len(before) != uses or len(before) >= max_uses:
                at = ", ".join(map(str, before)) or "no version"
                self.faults.append(f"{where} is trained at {version} after {uses} uses, and was at {at}")
            if bound is not None and version.number - row.version_span.oldest.number > bound:
                self.faults.append(f"{where} of {row.version_span.oldest} is trained at {version}: above {bound}")
            before.append(version)
            self._compare("trained", row)

    def settle(self, ledger: Path, waiting: Mapping[str, int]) -> Counter[tuple[str, str | None]]:
        """The simulation is over: compare the ledger with all that was seen.

        Args:
            ledger: its file.
            waiting: rows without a fate by policy, as the queues count them.

        Returns:
            Rows by (policy, fate).
        """
        with open_ledger(ledger) as db:
            rows = db.execute("SELECT trajectory_id, model_id, group_id, fate FROM rows").fetchall()
        self._compare_ledger(rows)
        self._compare_groups(rows)
        self._compare_calls()
        fates = Counter((row["model_id"], row["fate"]) for row in rows)
        for model_id, count in waiting.items():
            if fates[model_id, None] != count:
                self.faults.append(f"{model_id}: {fates[model_id, None]} rows wait in the ledger, {count} in its queue")
        return fates

    def _compare(self, what: str, row: Trajectory) -> None:
        """Ids, log-probs and versions under mask 1 are what the engine gave (invariants 1 and 5)."""
        engine = self._engines[row.model_id]
        calls = [engine.emissions.get(name) for name in self._rows.get(row.trajectory_id, ())]
        if not calls or None in calls:
            self.faults.append(f"row {row.trajectory_id} is {what}, but no engine sampled it")
            return
        ids = [token for call in calls for token in call.ids]
        numbers = [version.number for call in calls for version in call.versions]
        mask = row.response_mask.astype(bool)
        same = (
            np.array_equal(row.response_ids[mask], ids)
            and np.array_equal(row.log_probs[mask], [log_prob_of(token) for token in ids])
            and np.array_equal(row.versions[mask], numbers)
        )
        if not same:
            self.faults.append(f"row {row.trajectory_id} is {what} with other tokens than the engine sampled")

    def _compare_ledger(self, rows: list[sqlite3.Row]) -> None:
        in_ledger = {row["trajectory_id"]: row["fate"] for row in rows}
        for name in self._rows.keys() ^ in_ledger.keys():
            missing = "the ledger" if name in self._rows else "the records"
            self.faults.append(f"row {name} is not in {missing}")
        trained = {name for name, fate in in_ledger.items() if fate == TRAINED}
        for name in trained ^ self._trained.keys():
            where = "the ledger" if name in trained else "its trainer"
            self.faults.append(f"row {name} is trained by the account of {where} only")

    def _compare_groups(self, rows: list[sqlite3.Row]) -> None:
        """A group has one fate (whole groups only); rows that never waited are not in it."""
        fates: defaultdict[tuple[str, str], set[str | None]] = defaultdict(set)
        for row in rows:
            if row["fate"] not in _BY_ROW:
                fates[row["model_id"], row["group_id"]].add(row["fate"])
        for (model_id, group_id), found in fates.items():
            if len(found) > 1:
                self.faults.append(f"group {group_id} of {model_id} is torn: {sorted(map(str, found))}")

    def _compare_calls(self) -> None:
        """Every call that was sampled to its end is in one row, or its workflow was given up."""
        in_rows = Counter(call for calls in self._rows.values() for call in calls)
        for engine in self._engines.values():
            for name, call in engine.emissions.items():
                gone = self._ended.get(name.split(":")[0], "aborted") in ("failed", "aborted")
                if in_rows[name] > 1 or (call.complete and not in_rows[name] and not gone):
                    self.faults.append(f"call {name} was sampled once and is in {in_rows[name]} rows")

    @property
    def rows(self) -> int:
        """Rows that were recorded."""
        return len(self._rows)
