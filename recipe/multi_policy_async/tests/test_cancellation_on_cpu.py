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
"""A cancellation is never lost (invariant 10).

Before Python 3.12 ``asyncio.wait_for`` swallows one that comes just when what it waits for is done: its caller goes on
as if nobody had ended it. ``asyncio.timeout`` has no such fault.
"""

import ast
import asyncio
from pathlib import Path

import pytest

from ..ingest.serial import Broadcast

RECIPE = Path(__file__).parents[1]


def test_no_wait_of_the_recipe_uses_wait_for():
    def uses(source: Path) -> bool:
        nodes = ast.walk(ast.parse(source.read_text()))
        return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for" for node in nodes)

    sources = [path for path in RECIPE.rglob("*.py") if "tests" not in path.relative_to(RECIPE).parts]
    assert [str(path.relative_to(RECIPE)) for path in sources if uses(path)] == []
    assert len(sources) > 100


@pytest.mark.parametrize("turns_of_the_loop", range(4))
def test_who_waits_for_a_change_and_is_cancelled_just_behind_it_goes_no_further(turns_of_the_loop):
    went_on = []

    async def wait(event: asyncio.Event) -> None:
        await Broadcast.wait(event, 10)
        await asyncio.sleep(0.01)
        went_on.append(True)

    async def run():
        changes = Broadcast()
        waiting = asyncio.create_task(wait(changes.now()))
        await asyncio.sleep(0)
        changes.notify()
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(run())
    assert went_on == []
