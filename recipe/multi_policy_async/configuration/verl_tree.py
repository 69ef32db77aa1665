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
"""verl's own default configuration of the fully async trainer, composed without importing verl or torch.

verl's ``fully_async_ppo_trainer.yaml`` names its search path ``pkg://verl.trainer.config``, which imports verl
(five seconds) and is refused by Hydra below a ``file://`` path. Its base, ``ppo_trainer``, has no such block: that is
composed by Hydra, and the body of the fully async file is merged over it, which is what Hydra would do.
"""

import copy
import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from .errors import ConfigError, Problem

LEGACY_KEYS = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""Removed from the tree as ``migrate_legacy_reward_impl`` does (verl/experimental/reward_loop/reward_loop.py:39)."""

REQUIRED_VERL = "0.9.1"


def find_verl() -> Path:
    """Folder of the installed verl package; verl is not imported.

    Raises:
        ConfigError: verl is not installed, or not in the required version.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError([Problem("verl", "is not installed", fix=f"pip install verl=={REQUIRED_VERL}")])
    try:
        found = version("verl")
    except PackageNotFoundError:  # a source checkout on the path: its version file decides
        found = (Path(spec.submodule_search_locations[0]) / "version" / "version").read_text().strip()
    if found != REQUIRED_VERL:
        raise ConfigError([Problem("verl", f"version {found} is installed", allowed=REQUIRED_VERL)])
    return Path(spec.submodule_search_locations[0])


@functools.cache
def _composed() -> dict[str, Any]:
    root = find_verl()
    with initialize_config_dir(str(root / "trainer" / "config"), version_base=None, job_name="verl"):
        base = compose("ppo_trainer")
    OmegaConf.set_struct(base, False)
    body = OmegaConf.load(root / "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml")
    for hydra_block in ("hydra", "defaults"):
        body.pop(hydra_block)
    tree = OmegaConf.to_container(OmegaConf.merge(base, body), resolve=False)
    for key in LEGACY_KEYS:
        del tree[key]
    return tree


def verl_defaults() -> dict[str, Any]:
    """A fresh copy of verl's ``fully_async_ppo_trainer`` tree, interpolations unresolved."""
    return copy.deepcopy(_composed())
