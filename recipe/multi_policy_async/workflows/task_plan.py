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
"""In which order tasks are started."""

from collections.abc import Iterator, Mapping, Set

import numpy as np


def task_order(tasks: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    """Task indices of one epoch; the same (seed, epoch) always gives the same order, which resuming relies on."""
    if not shuffle:
        return list(range(tasks))
    return np.random.default_rng((seed, epoch)).permutation(tasks).tolist()


def plan_tasks(
    tasks: int,
    *,
    shuffle: bool,
    seed: int,
    epochs: int | None,
    max_tasks: int | None,
    started: Mapping[int, Set[int]],
) -> Iterator[tuple[int, int]]:
    """``(epoch, task)`` pairs that were not started yet, in order.

    Args:
        tasks: size of the dataset.
        shuffle: shuffle within each epoch.
        seed: of the shuffling.
        epochs: ``None``: without end.
        max_tasks: tasks of the whole run, those started before included.
        started: tasks started by an earlier process, by epoch.
    """
    left = None if max_tasks is None else max_tasks - sum(len(done) for done in started.values())
    epoch = 0
    while epochs is None or epoch < epochs:
        done = started.get(epoch, frozenset())
        for task in task_order(tasks, epoch, shuffle=shuffle, seed=seed):
            if task in done:
                continue
            if left is not None:
                if left <= 0:
                    return
                left -= 1
            yield epoch, task
        epoch += 1
