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
"""Through sglang-router and through verl's Ray client the same real replicas give the same trajectories."""

import asyncio

import numpy as np
import pytest

from recipe.multi_policy_async.gateway.client import GatewayControlClient
from recipe.multi_policy_async.gateway.router_process import RouterProcess
from recipe.multi_policy_async.gateway.spec import GatewaySpec
from recipe.multi_policy_async.gateway_binding_registry import ModelState, ModelStatus
from recipe.multi_policy_async.multi_model_gateway_router import MultiModelGatewayRouter
from recipe.multi_policy_async.tests.fakes.gateway_world import DEFAULTS, CollectingSink, World, binding
from recipe.multi_policy_async.tests.fakes.tiny_model_folder import make_model_folder
from recipe.multi_policy_async.tests.with_ray.test_hf_replica_on_ray import (  # noqa: F401  a fixture
    cluster,
    make_config,
)
from recipe.multi_policy_async.trajectory import Trajectory, Version

pytestmark = pytest.mark.ray

MODEL = "planner_model"
W = "e0-t0-s0-a0"
SERVED = Version(0, 4)


@pytest.fixture(scope="module")
def rollout(cluster, tmp_path_factory):  # noqa: F811
    """A frozen model's rollout side with verl's client: two replicas, no trainer."""
    from recipe.multi_policy_async.runtime.rollout_runtime import RolloutRuntime
    from recipe.multi_policy_async.tests.tiny_qwen3 import save_tiny_qwen3

    folder = save_tiny_qwen3(tmp_path_factory.mktemp("model"), vocabulary=300)
    make_model_folder(folder)
    config = make_config(folder)
    config.actor_rollout_ref.rollout.load_format = "auto"
    config.actor_rollout_ref.rollout.custom = {"namespace": "upstreams", "incarnation": SERVED.incarnation}
    spec = GatewaySpec.model_validate({**DEFAULTS, "upstream": "verl_client"})
    runtime = RolloutRuntime(MODEL, config, 10, spec, tmp_path_factory.mktemp("logs"))

    async def start():
        await runtime.start()
        await runtime.open_untrained(SERVED)

    asyncio.run(start())
    yield folder, runtime
    runtime.stop()


@pytest.fixture(scope="module")
def router(rollout, tmp_path_factory):
    process = RouterProcess(
        MODEL, rollout[1].server_urls, DEFAULTS["router"], tmp_path_factory.mktemp("router") / "log"
    )
    process.start()
    asyncio.run(process.wait_ready())
    yield process
    process.stop()


async def play(world: World) -> list[str]:
    """Two agents' conversations: turns that build on each other, a stream, a stop string, a length limit."""
    endpoints = await world.open(W)
    said = []
    for agent_id in ("planner", "critic"):
        agent = world.client(endpoints[agent_id]).chat.completions
        messages = [{"role": "user", "content": f"{agent_id}, hello"}]
        for turn, limits in enumerate(({"max_tokens": 24}, {"max_tokens": 40, "stop": ["a"]}, {})):
            if turn == 1:
                stream = await agent.create(model="m", messages=messages, temperature=0, stream=True, **limits)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            else:
                answer = await agent.create(model="m", messages=messages, temperature=0, **limits)
                text = answer.choices[0].message.content
            said.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    await world.control.finalize(W, rewards=1.0)
    return said


def trajectories(rollout, upstream: str, router_url: str) -> tuple[list[str], list[Trajectory]]:
    folder, runtime = rollout

    async def run():
        sink = CollectingSink()
        mapping = {"planner": MODEL, "critic": MODEL}
        gateway = MultiModelGatewayRouter(
            GatewaySpec.model_validate({**DEFAULTS, "upstream": upstream}), mapping, [MODEL], sink
        )
        base_url = await gateway.start()
        world = World(gateway, GatewayControlClient(base_url, gateway.control_key), {}, sink, base_url)
        bound = binding(
            MODEL,
            folder,
            router_url,
            trained=False,  # clients decide: greedy answers can be compared
            replica_urls=runtime.server_urls,
            verl_client=runtime.llm_server_client,
        )
        try:
            await gateway.bind(bound)
            await gateway.set_status(MODEL, ModelStatus(ModelState.OPEN, SERVED))
            return await play(world), sink.rows
        finally:
            for client in world.clients:
                await client.close()
            await world.control.close()
            await gateway.stop()

    return asyncio.run(run())


def test_router_and_verls_client_give_the_same_trajectories_from_real_replicas(rollout, router):
    said, rows = trajectories(rollout, "sglang_router", router.url)
    said_by_verl, rows_of_verl = trajectories(rollout, "verl_client", router.url)
    assert said == said_by_verl and all(said)
    assert len(rows) == len(rows_of_verl) == 6
    for ours, theirs in zip(rows, rows_of_verl, strict=True):
        assert ours.trajectory_id == theirs.trajectory_id
        for name in ("prompt_ids", "response_ids", "response_mask", "versions"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert set(ours.versions[ours.response_mask == 1]) == {SERVED.number}
        assert (ours.finish_reason, ours.incarnation) == (theirs.finish_reason, theirs.incarnation)
