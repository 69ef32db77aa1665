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
"""What many test modules share."""

import asyncio
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What the fast stage does not collect is slow where nothing says so, or no stage would run it."""
    for item in items:
        elsewhere = item.path.parent.name in ("slow", "with_ray", "with_torch")
        if elsewhere and not any(item.get_closest_marker(name) for name in ("slow", "ray")):
            item.add_marker("slow")


class _ShortSleeps:
    """``asyncio`` with twenty times shorter sleeps."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds / 20)


@pytest.fixture(scope="session", autouse=True)
def uvicorn_ends_soon():
    """It looks every tenth of a second whether it shall end, and then waits another: for each gateway of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", _ShortSleeps())
        yield


@pytest.fixture(scope="session")
def plain_job(tmp_path_factory):
    """``planner_solver_tiny`` as it is, composed once: that takes a while."""
    from .config_fixtures import tiny_job

    return tiny_job(tmp_path_factory.mktemp("plain_job"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """What a gateway reads of a model: tokenizer and template. Modules that need other ones have their own."""
    from .fakes.tiny_model_folder import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(folder):
    """Scripts for fake engines in the ids of ``folder``."""
    from .fakes.gateway_world import Texts

    return Texts(folder)
