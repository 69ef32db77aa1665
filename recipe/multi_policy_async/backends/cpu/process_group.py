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
"""The global process group of verl's workers on the CPU."""

import os

import torch.distributed
from verl.utils.distributed import initialize_global_process_group_ray

BACKEND = "cpu:gloo"


def init_process_group() -> None:
    """Create the global process group that verl's workers would create with an invalid backend string.

    Upstream gap (O2): ``verl/utils/distributed.py`` joins "cpu:gloo" with "<device>:<backend>", which names the CPU
    twice here. Its call becomes a no-op once a group exists. A group of one needs no port, so it cannot lose the race
    for the port that verl chose before the process started (C11).
    """
    if torch.distributed.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        torch.distributed.init_process_group(BACKEND, store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        initialize_global_process_group_ray(backend=BACKEND)
