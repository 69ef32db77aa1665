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
"""Two real ``hf`` replicas on Ray, weights pushed to both by verl's own checkpoint-engine manager."""

import asyncio
import os

import httpx
import pytest

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

CPU = "recipe.multi_policy_async.backends.cpu"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    os.environ["VERL_PLATFORM"] = "cpu"
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"VERL_PLATFORM": "cpu"}},
    )
    yield
    ray.shutdown()
    del os.environ["VERL_PLATFORM"]


@pytest.fixture(scope="module")
def replicas(cluster, tmp_path_factory):
    from omegaconf import OmegaConf
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    from recipe.multi_policy_async.backends.cpu.replica import HFReplica
    from recipe.multi_policy_async.tests.tiny_qwen3 import save_tiny_qwen3

    path = save_tiny_qwen3(tmp_path_factory.mktemp("model"))
    config = RolloutConfig(
        name="hf",
        dtype="float32",
        tensor_model_parallel_size=1,
        max_num_seqs=8,
        prompt_length=32,
        response_length=32,
        custom={"namespace": "planner", "incarnation": 3},
        checkpoint_engine=CheckpointEngineConfig(
            backend="gloo",
            update_weights_bucket_megabytes=1,
            engine_kwargs={"gloo": {"checksum": True, "timeout_s": 30.0}},
            custom_backend_module=f"{CPU}.gloo_checkpoint_engine",
        ),
    )
    model = OmegaConf.create({"path": str(path), "override_config": {}})
    made = [HFReplica(rank, config, model, gpus_per_node=1) for rank in range(2)]

    async def launch():
        await asyncio.gather(*(replica.init_standalone() for replica in made))

    asyncio.run(launch())
    return made


def trainer_group(seed: int):
    """A worker group that answers the manager as verl's trainer does, two ranks, over a model with other weights."""
    from recipe.multi_policy_async.tests.weight_sender import make_sender_group

    return make_sender_group(seed, ranks=2)


def test_two_replicas_serve_the_weights_and_version_that_the_trainer_sent(replicas):
    from verl.checkpoint_engine import CheckpointEngineManager

    from recipe.multi_policy_async.tests.tiny_qwen3 import full_forward_log_probs, tiny_qwen3

    with httpx.Client(base_url=f"http://{replicas[0].server_address}") as first:
        assert first.get("/model_info").json()["weight_version"] == "default"
        assert first.get("/server_info").json()["paused"]
    manager = CheckpointEngineManager(replicas[0].config.checkpoint_engine, trainer_group(seed=9), replicas)
    metrics = manager.update_weights(global_steps=5)
    served = ray.get([server.checksum.remote() for replica in replicas for server in replica.servers])
    assert served == [metrics["sync/checksum"]] * 2

    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}
    trained = tiny_qwen3(seed=9)
    for replica in replicas:
        answer = httpx.post(f"http://{replica.server_address}/generate", json=body, timeout=30).json()
        assert answer["meta_info"]["weight_version"] == "3.5"
        expected = full_forward_log_probs(trained, body["input_ids"], answer["output_ids"])
        reported = [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert reported == pytest.approx(expected, abs=1e-4)

    call = replicas[1].server_handle.generate.remote(
        prompt_ids=[1, 2, 3], sampling_params={"temperature": 1.0, "max_tokens": 4}, request_id="over-ray"
    )
    output = ray.get(call)
    assert output.extra_fields == {"global_steps": 5}
    assert len(output.token_ids) == len(output.log_probs) == 4
