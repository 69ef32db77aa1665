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
"""Python's cyclic garbage collector in a gateway process: it stops every request for as long as it looks.

With 2,000 open workflows a look at everything took half a second. A closed workflow is freed without it
(``WorkflowSession.release``), so the collector looks at what is new, which is little, seldom at the rest, and never at
what was there from the start.
"""

import gc

_NEW = 1000  # objects: a look at 20,000 took 30 ms
_SELDOM = (1000, 100)  # looks at what is new to one at what has stayed; of these to one at everything


def calm_collector() -> None:
    """For a process that only serves: call it once everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW, *_SELDOM)
