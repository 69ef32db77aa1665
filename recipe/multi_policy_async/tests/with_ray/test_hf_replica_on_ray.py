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
"""Real ``hf`` replicas and verl's real FSDP2 trainer workers on Ray: two of each, synced by verl's own manager."""

import asyncio
import os
import threading
import time

import httpx
import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.multi_policy_async.configuration.compose import CONFIG_DIR
from recipe.multi_policy_async.configuration.verl_tree import verl_defaults

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

PROMPT = [1, 2, 3]
TRAINED = 9  # seed of the trainer's weights; the replicas start with others
ENVIRONMENT = {"VERL_PLATFORM": "cpu", "TOKENIZERS_PARALLELISM": "false"}
LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by the address of a network interface


@pytest.fixture(scope="module")
def cluster():
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address=LOOPBACK,
    )
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def make_config(path) -> DictConfig:
    overlay = OmegaConf.load(CONFIG_DIR / "device" / "cpu.yaml")
    config = OmegaConf.merge(verl_defaults(), overlay)
    config.actor_rollout_ref.model.path = str(path)
    rollout = config.actor_rollout_ref.rollout
    rollout.n_gpus_per_node, rollout.nnodes = 1, 2
    rollout.prompt_length, rollout.response_length = 32, 1500
    rollout.custom = {"namespace": "planner", "incarnation": 3}
    rollout.checkpoint_engine.engine_kwargs.gloo = {"checksum": True, "timeout_s": 60}
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 2
    return config


@pytest.fixture(scope="module")
def parts(cluster, tmp_path_factory):
    """(replicas, manager) of one model, started side by side."""
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass

    from recipe.multi_policy_async.backends.cpu.replica import HFReplica
    from recipe.multi_policy_async.backends.cpu.workers import CpuDetachActorWorker
    from recipe.multi_policy_async.tests.tiny_qwen3 import save_tiny_qwen3

    served = make_config(save_tiny_qwen3(tmp_path_factory.mktemp("served"))).actor_rollout_ref
    trained = make_config(save_tiny_qwen3(tmp_path_factory.mktemp("trained"), seed=TRAINED)).actor_rollout_ref
    replicas = [HFReplica(rank, served.rollout, served.model, gpus_per_node=1) for rank in range(2)]

    async def launch_replicas():
        await asyncio.gather(*(replica.init_standalone() for replica in replicas))

    starting = threading.Thread(target=asyncio.run, args=(launch_replicas(),))
    starting.start()
    trainer = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1, name_prefix="planner_trainer"),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(CpuDetachActorWorker), config=trained, role="actor"),
        device_name="cpu",
    )
    trainer.init_model()
    starting.join()
    engine = omega_conf_to_dataclass(served.rollout.checkpoint_engine)
    return replicas, CheckpointEngineManager(engine, trainer, replicas)


def generate(replica, **params) -> dict:
    params = {"max_new_tokens": 6, "ignore_eos": True, **params}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    return httpx.post(f"http://{replica.server_address}/generate", json=body, timeout=60).json()


def log_probs(answer: dict) -> list[float]:
    return [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]]


def test_replicas_wait_for_their_first_weights_and_bind_loopback_only(parts):
    for replica in parts[0]:
        assert replica.server_address.startswith(f"{LOOPBACK}:")
        assert httpx.get(f"http://{replica.server_address}/model_info").json()["weight_version"] == "default"
        ray.get(replica.server_handle.resume_generation.remote())
        assert httpx.get(f"http://{replica.server_address}/server_info").json()["paused"]


def test_names_of_actors_and_placement_groups_carry_the_model(parts):
    """C2 and C3: two models' replicas of one rank live in one job."""
    groups = {group["name"] for group in ray.util.placement_group_table().values()}
    for rank in range(2):
        assert ray.get_actor(f"rollout_standalone_{rank}_plannerHFRolloutWorker_0:0") is not None
        assert f"rollout_pool_{rank}_plannerverl_group_1:0" in groups


def test_after_a_sync_all_replicas_serve_the_trainers_weights_under_the_new_version(parts):
    from recipe.multi_policy_async.tests.tiny_qwen3 import full_forward_log_probs, tiny_qwen3

    replicas, manager = parts
    metrics = manager.update_weights(global_steps=5)
    served = ray.get([replica.server_handle.checksum.remote() for replica in replicas])
    assert served == [metrics["sync/checksum"]] * 2
    trained = tiny_qwen3(seed=TRAINED)
    for replica in replicas:
        answer = generate(replica, temperature=0.8)
        assert answer["meta_info"]["weight_version"] == "3.5"
        assert log_probs(answer) == pytest.approx(
            full_forward_log_probs(trained, PROMPT, answer["output_ids"], temperature=0.8), abs=1e-4
        )
    output = ray.get(
        replicas[1].server_handle.generate.remote(
            prompt_ids=PROMPT,
            sampling_params={"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True},
            request_id="over-ray",
        )
    )
    assert output.extra_fields == {"global_steps": 5}
    assert output.stop_reason in ("completed", "length")
    assert len(output.token_ids) == len(output.log_probs) > 0


def test_a_sync_cuts_running_calls_with_partial_output_and_later_ones_carry_the_next_version(parts):
    replicas, manager = parts
    manager.update_weights(global_steps=6)
    answers: list[dict] = []
    calls = [
        threading.Thread(target=lambda r=r: answers.append(generate(r, max_new_tokens=1500))) for r in replicas * 4
    ]
    for call in calls:
        call.start()
    while sum(_running(replica) for replica in replicas) < len(calls) and not answers:
        time.sleep(0.002)
    manager.update_weights(global_steps=7)
    for call in calls:
        call.join()
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["weight_version"] in ("3.6", "3.7")
        assert meta["finish_reason"]["type"] in ("abort", "length")
        assert len(log_probs(answer)) == len(answer["output_ids"])
    assert any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers)
    assert {generate(replica)["meta_info"]["weight_version"] for replica in replicas} == {"3.7"}


def _running(replica) -> int:
    return httpx.get(f"http://{replica.server_address}/server_info").json()["num_running_reqs"]
