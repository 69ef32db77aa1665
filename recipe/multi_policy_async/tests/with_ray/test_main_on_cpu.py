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
"""The entry point: exit codes, one clear message, nothing started for a job that cannot run."""

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from ... import multi_model_disaggregate_trainer
from ...configuration import ray_cluster
from ...configuration.resources import Node
from ...configuration.schema import JobSpec, RaySpec
from ...main_multi_policy import EXIT_CONFIG, EXIT_INTERRUPTED, StartSignals, main
from ..config_fixtures import PLANNER, SOLVER, tiny_overrides

pytestmark = pytest.mark.slow  # whole jobs are composed

SECONDS = 120  # on a busy machine; a second or two on a quiet one, eight with Ray


def run_main(tmp_path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy", "-cn", "planner_solver_tiny"]
    return subprocess.run(
        [*command, *tiny_overrides(tmp_path), *overrides], capture_output=True, text=True, timeout=SECONDS
    )


def test_several_mistakes_give_one_message_and_exit_2_without_a_traceback(tmp_path):
    done = run_main(
        tmp_path,
        "agent_model_mapping.solver=slover_model",
        "agent_model_mapping.critic=null",
        f"{SOLVER}.model_path=/nowhere",
        f"{PLANNER}.actor_rollout_ref.actor.optm.lr=1",
    )
    assert done.returncode == EXIT_CONFIG
    assert "Traceback" not in done.stderr and done.stdout == ""
    for named in ("'solver_model'", "mapped to nothing", "/nowhere", "'optim'"):
        assert named in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["agent_model_mapping.planner=nobody"],
        ["agent_model_mapping.planner=null"],
        [f"{PLANNER}.model_path=/nowhere"],
        ["no_such_key=1"],
        ["device=tpu"],
        ["workflow.name=no_such_workflow"],
        ["not an override"],
    ],
)
def test_a_misconfiguration_exits_2(tmp_path, overrides, capsys):
    assert main(["-cn", "planner_solver_tiny", *tiny_overrides(tmp_path), *overrides]) == EXIT_CONFIG
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and not printed.out


def test_a_duplicate_model_id_exits_2(tmp_path, capsys):
    composition = {
        "defaults": ["multi_policy_trainer", "_self_"],
        "multi_model": {"models": [{"model_id": "a"}, {"model_id": "a"}]},
        "agent_model_mapping": {"agent": "a"},
    }
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump(composition))
    assert main(["-cd", str(tmp_path), "-cn", "twice"]) == EXIT_CONFIG
    assert "'a' is given twice" in capsys.readouterr().err


def test_an_agent_that_the_workflow_calls_must_be_mapped(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    agents = ('planner', 'judge')\n    async def run(self, task, agents): return 0.0\n"
    )
    overrides = ["workflow.name=Mine", f"workflow.path={tmp_path}/mine.py"]
    assert main(["-cn", "planner_solver_tiny", *tiny_overrides(tmp_path), *overrides]) == EXIT_CONFIG
    assert "agent_model_mapping.judge" in capsys.readouterr().err


def test_explain_shows_models_agents_resources_and_origins_and_starts_nothing(tmp_path, capsys):
    lr = f"{PLANNER}.actor_rollout_ref.actor.optim.lr"
    arguments = ["--explain", "-cn", "planner_solver_tiny", *tiny_overrides(tmp_path), f"{lr}=0.125"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "solver -> solver_model" in shown
    assert "planner_model trainer" in shown
    row = next(line for line in shown.splitlines() if "optim.lr " in line and "0.125" in line)
    assert row.split()[1:] == ["0.125", "models.planner_model", "(command", "line)"]
    assert "ppo_micro_batch_size_per_gpu: null" not in shown
    assert not (tmp_path / "run").exists()


def test_explain_resolved_appends_the_whole_verl_configuration(tmp_path, capsys):
    main(["--explain", "--resolved", "-cn", "planner_solver_tiny", *tiny_overrides(tmp_path)])
    documents = capsys.readouterr().out.split("# planner_model: resolved verl configuration\n")[1]
    planner = yaml.safe_load(documents.split("# solver_model: resolved")[0])
    assert planner["actor_rollout_ref"]["actor"]["ppo_micro_batch_size_per_gpu"] is None


def test_a_run_directory_is_never_shared_by_two_runs(tmp_path, capsys):
    (tmp_path / "run" / "config").mkdir(parents=True)
    (tmp_path / "run" / "config" / "job.yaml").touch()
    assert main(["-cn", "planner_solver_tiny", *tiny_overrides(tmp_path)]) == EXIT_CONFIG
    assert "holds another run" in capsys.readouterr().err


def test_a_job_that_does_not_fit_leaves_its_run_directory_to_the_corrected_command(tmp_path, monkeypatch, capsys):
    nodes = [Node("here", 2, 64)]
    monkeypatch.setattr(ray_cluster, "connected", lambda job: contextlib.nullcontext())
    monkeypatch.setattr(ray_cluster, "available_nodes", lambda: nodes)
    monkeypatch.setattr(multi_model_disaggregate_trainer, "run", lambda job, restore: 0)
    command = ["-cn", "planner_solver_tiny", *tiny_overrides(tmp_path)]
    assert main(command) == EXIT_CONFIG
    assert "too few GPUs" in capsys.readouterr().err and not (tmp_path / "run").exists()
    nodes[:] = [Node("here", 4, 64)]
    assert main(command) == 0
    assert (tmp_path / "run" / "config" / "job.yaml").is_file()
    assert main(command) == EXIT_CONFIG
    assert "holds another run" in capsys.readouterr().err


class TestRayArguments:
    @pytest.fixture(autouse=True)
    def no_ray_of_the_shell(self, monkeypatch):
        for name in ("RAY_ADDRESS", "OMP_NUM_THREADS", "VERL_USE_EXTERNAL_MODULES"):
            monkeypatch.delenv(name, raising=False)

    @staticmethod
    def with_ray(job: JobSpec, **ray_init) -> JobSpec:
        return job.model_copy(update={"ray_kwargs": RaySpec(ray_init=ray_init)})

    def test_a_ray_of_our_own_is_started_on_loopback_whatever_runs_on_the_machine(self, plain_job):
        arguments = ray_cluster.init_arguments(plain_job)
        assert arguments["address"] == "local"
        assert ipaddress.ip_address(arguments["_node_ip_address"]).is_loopback
        assert arguments["num_gpus"] == 4
        assert "runtime_env" not in arguments

    def test_on_a_running_cluster_the_environment_travels_with_the_job(self, plain_job):
        arguments = ray_cluster.init_arguments(self.with_ray(plain_job, address="auto"))
        assert arguments["runtime_env"]["env_vars"]["VERL_PLATFORM"] == "cpu"
        assert "num_gpus" not in arguments and "_node_ip_address" not in arguments

    def test_what_the_user_sets_wins(self, plain_job):
        arguments = ray_cluster.init_arguments(self.with_ray(plain_job, num_gpus=9, log_to_driver=True))
        assert (arguments["num_gpus"], arguments["log_to_driver"]) == (9, True)

    def test_the_platform_is_chosen_by_the_device_and_threads_by_the_cores(self, plain_job):
        variables = ray_cluster.environment(plain_job)
        assert variables["VERL_PLATFORM"] == "cpu"
        assert int(variables["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 4)
        assert "VERL_PLATFORM" not in ray_cluster.environment(plain_job.model_copy(update={"device": "gpu"}))

    def test_a_folder_without_an_entry_point_still_registers_its_platform(self, plain_job, monkeypatch):
        plugin = "recipe.multi_policy_async.backends.cpu.plugin"
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
        assert ray_cluster.environment(plain_job)["VERL_USE_EXTERNAL_MODULES"] == f"mine,{plugin}"

    def test_modules_of_the_user_are_imported_by_every_process_on_gpus_too(self, plain_job, monkeypatch):
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
        on_gpus = plain_job.model_copy(update={"device": "gpu"})
        assert ray_cluster.environment(on_gpus)["VERL_USE_EXTERNAL_MODULES"] == "mine"


SLEEPER = "import signal, sys, time; {setting}; print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("setting", "grace_s"),
    [("pass", 60.0), ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0.0)],
    ids=["ends by itself", "has to be killed"],
)
def test_the_job_ends_after_the_processes_it_started(setting, grace_s):
    with subprocess.Popen([sys.executable, "-c", SLEEPER.format(setting=setting)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        ray_cluster.end_processes({psutil.Process(process.pid)}, grace_s)
        assert process.wait(timeout=SECONDS) == (-signal.SIGTERM if grace_s else -signal.SIGKILL)


def test_a_signal_that_was_swallowed_while_ray_started_still_interrupts():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        signals = StartSignals()
        signals.check()
        with contextlib.suppress(KeyboardInterrupt):  # as Ray's start may do
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


@pytest.mark.ray
def test_too_few_resources_end_in_a_table_before_any_actor_starts(tmp_path):
    started = time.monotonic()
    done = run_main(tmp_path, "ray_kwargs.ray_init.num_gpus=2")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "too few GPUs: the job needs 4, the cluster has 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < SECONDS


@pytest.mark.ray
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_leaves_no_process_behind(tmp_path, signum):
    command = [sys.executable, "-m", "recipe.multi_policy_async.main_multi_policy", "-cn", "planner_solver_tiny"]
    with subprocess.Popen([*command, *tiny_overrides(tmp_path)], stderr=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + SECONDS
        while not (started := psutil.Process(job.pid).children(recursive=True)):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signum)
        assert job.wait(SECONDS) == EXIT_INTERRUPTED
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
