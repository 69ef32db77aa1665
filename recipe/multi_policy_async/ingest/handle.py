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
"""Call an async method of a plain object or of a Ray actor in the same way."""

from collections.abc import Awaitable
from typing import Any


class TargetDiedError(RuntimeError):
    """The Ray actor that was called is gone."""


def invoke(target: Any, method: str, *args: Any) -> Awaitable[Any]:
    """Start a call; an actor has it when this returns, a plain object's coroutine starts when it is awaited.

    Awaiting the result raises ``TargetDiedError`` if the actor is dead; what the method itself raises passes through.
    """
    function = getattr(target, method)
    remote = getattr(function, "remote", None)
    return function(*args) if remote is None else _answer(remote(*args), method)


async def call(target: Any, method: str, *args: Any) -> Any:
    """``await target.method(*args)``, through ``.remote`` if ``target`` is a Ray actor handle.

    Raises:
        TargetDiedError: the actor is dead.
    """
    return await invoke(target, method, *args)


async def _answer(reference: Any, method: str) -> Any:
    from ray.exceptions import RayActorError

    try:
        return await reference
    except RayActorError as error:
        raise TargetDiedError(f"{type(error).__name__} in {method}: {error}") from error
