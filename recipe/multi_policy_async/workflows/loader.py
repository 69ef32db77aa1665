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
"""Finds what users wrote: workflow classes and reward functions."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_HERE = __package__
BUILT_IN = {
    "planner_solver": f"{_HERE}.planner_solver.PlannerSolver",
    "planner_solver_verifier": f"{_HERE}.planner_solver.PlannerSolverVerifier",
    "single_agent": f"{_HERE}.single_agent.SingleAgent",
}


def load_workflow_class(name: str, path: str | None = None) -> type:
    """The class ``name`` of the file or module ``path``; without ``path``, a dotted name or a built-in one.

    Args:
        name: a class name, ``package.module.Class``, or one of ``BUILT_IN``.
        path: a ``.py`` file, or ``pkg://package.module`` (as verl's ``custom_cls.path``).

    Raises:
        ValueError: there is no such file, module or class, or it has no ``run``.
    """
    if path is not None:
        module, attribute = _load_module(path), name
    else:
        module_name, dot, attribute = BUILT_IN.get(name, name).rpartition(".")
        if not dot:
            raise ValueError(
                f"workflow.name {name!r} is neither a dotted class name nor one of {', '.join(sorted(BUILT_IN))}; "
                "a class in a file needs workflow.path too"
            )
        module = _import(module_name)
    found = getattr(module, attribute, None)
    if not isinstance(found, type) or not callable(getattr(found, "run", None)):
        raise ValueError(f"workflow: {module.__name__} has no class {attribute!r} with a run method")
    return found


def load_attribute(path: str, name: str) -> Any:
    """What ``name`` is in a ``.py`` file or ``pkg://package.module``.

    Raises:
        ValueError: there is no such file, module or name.
    """
    module = _load_module(path)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no {name!r}")
    return getattr(module, name)


def _load_module(path: str) -> Any:
    if path.startswith("pkg://"):
        return _import(path.removeprefix("pkg://"))
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"path {path!r} is not a file")
    name = f"user_file_{file.stem}_{hashlib.blake2s(str(file.resolve()).encode(), digest_size=3).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"path {path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r}") from error
        raise
