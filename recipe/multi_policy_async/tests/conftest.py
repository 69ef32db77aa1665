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

from pathlib import Path

import pytest

from ..configuration.schema import JobSpec
from .config_fixtures import tiny_job


@pytest.fixture(scope="session")
def plain_job(tmp_path_factory) -> JobSpec:
    """``planner_solver_tiny`` as it is, composed once: that takes a while."""
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
