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
"""The CPU plugin: active only where it was asked for, light to load, complete where verl needs it."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import pytest
import torch
from verl.plugin.platform.platform_base import PlatformBase

from recipe.multi_policy_async.backends.cpu import plugin
from recipe.multi_policy_async.backends.cpu.platform import PlatformCPU

pytestmark = pytest.mark.slow

PLUGIN = "recipe.multi_policy_async.backends.cpu.plugin"
DEVICE_CALLS = "empty_cache synchronize set_device reset_peak_memory_stats memory_allocated max_memory_reserved".split()


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; verl chooses its platform once per process."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_plugin_imports_neither_torch_nor_verl_nor_the_backend_unless_asked_for():
    code = f"""
        import sys, {PLUGIN} as plugin
        plugin.check_platform()
        heavy = ("torch", "verl", "ray", "transformers")
        print([name for name in sys.modules if name.split(".")[0] in heavy or "backends.cpu.platform" in name])
    """
    assert python(code) == "[]"


CHECKED = f"""
import verl
from {PLUGIN} import check_platform
check_platform()
from verl.utils.device import get_device_name, get_nccl_backend
print(get_device_name(), get_nccl_backend())
"""


@pytest.fixture(scope="module")
def in_a_trainer_process() -> str:
    """What a process that loads the plugin as an external module prints; importing verl is slow, so one serves all."""
    code = """
        import os
        import torch.distributed as dist
        import recipe.multi_policy_async.backends.cpu.workers as workers
        from verl.utils.distributed import initialize_global_process_group_ray
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        for kind, engine in (("language_model", workers.CpuFSDP2Engine), ("value_model", workers.CpuFSDP2ValueEngine)):
            print(kind, EngineRegistry.get_engine_cls(kind, "fsdp2") is engine)

        class Config:
            forward_only = True

        seen = []
        FSDPEngineWithLMHead._build_fsdp_module = lambda self, module: seen.append(self.engine_config.forward_only)
        engine = object.__new__(workers.CpuFSDP2Engine)
        engine.engine_config = Config()
        engine._build_fsdp_module(None)
        print("built forward-only", seen, "is forward-only", engine.engine_config.forward_only)

        os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        workers.init_process_group()
        initialize_global_process_group_ray()
        value = __import__("torch").ones(2)
        dist.all_reduce(value)
        print("group of", dist.get_world_size(), value.tolist())
    """
    alone = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": PLUGIN}
    return python(CHECKED + textwrap.dedent(code), VERL_PLATFORM="cpu", **alone)


def test_the_installed_package_offers_the_plugin_where_verl_looks_for_it():
    assert PLUGIN in {point.value for point in entry_points(group="verl.plugins")}


def test_a_folder_that_is_not_installed_is_loaded_as_an_external_module(in_a_trainer_process):
    assert "cpu gloo" in in_a_trainer_process


def test_verls_engines_are_registered_for_the_cpu(in_a_trainer_process):
    assert "language_model True" in in_a_trainer_process
    assert "value_model True" in in_a_trainer_process


def test_a_reference_model_is_built_without_pinned_memory_and_stays_forward_only(in_a_trainer_process):
    assert "built forward-only [False] is forward-only True" in in_a_trainer_process


def test_a_process_group_of_one_needs_no_port(in_a_trainer_process):
    assert "group of 1 [1.0, 1.0]" in in_a_trainer_process


def test_the_check_fails_when_verl_chose_its_platform_before_it_was_asked(monkeypatch):
    from verl.plugin.platform import platform_manager

    class Other(PlatformCPU):
        device_name = "cuda"

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(platform_manager, "_current_platform", Other())
    with pytest.raises(RuntimeError, match="already runs on platform 'cuda'"):
        plugin.check_platform()


def test_the_check_fails_when_verl_swallowed_the_plugins_error(monkeypatch):
    from verl.plugin.platform import platform_manager

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    monkeypatch.setattr(platform_manager.PlatformRegistry, "_platforms", {})
    with pytest.raises(RuntimeError, match="did not load the CPU platform.*VERL_USE_EXTERNAL_MODULES"):
        plugin.check_platform()


def test_the_platform_is_complete_and_its_device_is_no_index():
    platform = PlatformCPU()
    assert not PlatformCPU.__abstractmethods__
    assert {name for name in PlatformBase.__abstractmethods__ if not hasattr(platform, name)} == set()
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert not platform.is_platform_available(use_smi_check=True)  # auto-detection never chooses it
    assert platform.ray_resource_options(2) == {"num_gpus": 2}


def test_the_device_module_answers_what_verl_calls_on_an_accelerator():
    module = PlatformCPU().device_module
    assert [getattr(module, name)() or 0 for name in DEVICE_CALLS] == [0] * len(DEVICE_CALLS)
    free, total = module.mem_get_info()
    assert 0 < free <= total
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
