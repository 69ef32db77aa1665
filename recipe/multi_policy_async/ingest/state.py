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
"""What the ingestor knows: the ledger on disk, and in memory what is open, queued and counted.

Intake and Outlet share it. Every change goes to the ledger first, then to memory, under one lock
(``serial.exclusively``).
"""

import time
from collections.abc import Callable
from pathlib import Path

from .accounts import Account
from .batch_source import End, ProducerDied
from .group_queue import GroupQueue
from .groups import OpenTask
from .holding import InFlight, VersionPin
from .ledger import Ledger
from .schedule import make_schedule
from .serial import Broadcast, Serial
from .spec import IngestSpec
from .stagger import SyncStagger

_RECENT_WORKFLOWS = 64  # that the running mean of their time remembers


class IngestState:
    """Opens the ledger and reads back unfinished work.

    Args:
        ledger_path: SQLite file, made if missing.
        spec: the rules that hold for all policies.
        clock: monotonic seconds.
    """

    def __init__(self, ledger_path: str | Path, spec: IngestSpec, clock: Callable[[], float] = time.monotonic):
        self.spec = spec
        self.clock = clock
        self.ledger = Ledger(ledger_path, synchronous=spec.synchronous)
        self.serial = Serial()
        self.changes = Broadcast()
        self.schedule = make_schedule(spec)
        self.stagger = SyncStagger(spec.stagger.max_wait_s)
        self.queues: dict[str, GroupQueue] = {}
        self.pin = VersionPin(clock)
        self.end: End | ProducerDied | None = None
        self.workflow_s: float | None = None  # running mean of how long workflows take
        self.baselines = self.ledger.baselines()
        recovered = self.ledger.recover()
        self.next_row_id = recovered.next_row_id
        self.next_close = recovered.next_close
        self.in_flight = {name: InFlight(*place) for name, place in recovered.in_flight.items()}
        self.open = {
            key: OpenTask(members, recovered.terminal_samples.get(key, set()))
            for key, members in recovered.open_tasks.items()
        }
        self.accounts = Account.from_ledger(self.ledger)

    @property
    def closed_tasks(self) -> int:
        return self.next_close - 1

    def workflow_ended(self, workflow: InFlight) -> None:
        """Learn how long workflows take."""
        if workflow.issued is not None:
            seconds = self.clock() - workflow.issued
            known = seconds if self.workflow_s is None else self.workflow_s
            self.workflow_s = known + (seconds - known) / _RECENT_WORKFLOWS

    def has_room(self) -> bool:
        """Whether another task may be started now."""
        return self.schedule.has_room(self.queues, len(self.open), self.closed_tasks)

    def may_take(self, queue: GroupQueue) -> bool:
        """Whether the policy gets a batch now; once the data has ended everybody gets the rest."""
        if self.end is not None:
            return True
        return (
            not queue.warms_up(self.closed_tasks)
            and self.schedule.in_turn(queue.model_id, self.queues, self.closed_tasks)
            and self.schedule.may_take(self.queues, len(self.open), self.closed_tasks)
        )

    def queue(self, model_id: str) -> GroupQueue:
        """The queue of a registered policy.

        Raises:
            ValueError: it is not registered.
        """
        if model_id not in self.queues:
            known = ", ".join(sorted(self.queues)) or "none"
            raise ValueError(f"policy {model_id!r} is not registered; registered: {known}")
        return self.queues[model_id]

    def is_current(self, queue: GroupQueue) -> bool:
        """Whether ``queue`` still is its policy's: a restarted policy gets a new one, with the same rows."""
        return self.queues.get(queue.model_id) is queue

    def forget_open_rows(self, model_id: str) -> list[int]:
        """Take a policy's rows out of the open tasks; returns their ids."""
        gone = self.open_row_ids(model_id)
        for task in self.open.values():
            task.groups = task.groups.without(model_id)
        return gone

    def open_row_ids(self, model_id: str) -> list[int]:
        """Ids of a policy's rows whose task is not over."""
        return [row_id for task in self.open.values() for row_id in task.groups.row_ids(model_id)]
