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
"""Entry point of the CPU backend: registers verl's CPU platform, only where ``VERL_PLATFORM=cpu``.

verl loads this module inside ``import verl`` in every process, through the ``verl.plugins`` entry point group or
through ``VERL_USE_EXTERNAL_MODULES=recipe.multi_policy_async.backends.cpu.plugin``. So it stays light: engine, replica
and checkpoint engine are registered by the modules that hold them, where they are used.
"""

import os

PLATFORM = "cpu"


def is_selected() -> bool:
    """Whether this process was asked to run without accelerators."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM


def check_platform() -> None:
    """Fail where ``VERL_PLATFORM=cpu`` did not take effect.

    verl logs the errors of its plugins at DEBUG and goes on, so a broken plugin shows up much later and elsewhere.

    Raises:
        RuntimeError: the environment asks for the CPU platform and verl runs on another, or on none.
    """
    if not is_selected():
        return
    from verl.plugin.platform import get_platform

    try:
        name = get_platform().device_name
    except ValueError as error:  # verl's "Unknown platform"
        raise RuntimeError(
            "VERL_PLATFORM=cpu is set, but verl did not load the CPU platform of multi_policy_async. Install the "
            f"package, or set VERL_USE_EXTERNAL_MODULES={__name__} (verl says: {error})"
        ) from error
    if name != PLATFORM:
        raise RuntimeError(
            f"VERL_PLATFORM=cpu is set, but verl already runs on platform {name!r}: set it before verl is imported, "
            "and in every Ray worker"
        )


if is_selected():
    from . import platform  # noqa: F401  (registers itself)
