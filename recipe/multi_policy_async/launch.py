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
"""Creates the job's actors.

Control actors ask for no CPU: they would only displace trainer ranks. None has a name: handles are passed, so two jobs
on one cluster cannot meet. All run on the driver's node, since gateway and routers talk to each other on loopback;
trainer ranks and replicas go where Ray finds room.
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .component import enter_component
from .configuration.schema import JobSpec
from .gateway.client import GatewayControlClient
from .gateway.collector import calm_collector
from .gateway_group import GatewayGroup
from .ledger import LEDGER_FILE
from .model_async_runtime import ModelAsyncRuntime
from .multi_model_gateway_router import IngestorSink, MultiModelGatewayRouter
from .run_directory import wait_for_lock
from .trajectory_ingestor import TrajectoryIngestor
from .workflow_driver import WorkflowDriver

RUNTIME_THREADS = 4  # fit, next_reports, check_serving, stop
SERVER_CALLS = 1000
FORMER_INGESTOR_S = 60.0  # that of a killed job may live for seconds


class _Watched:
    """A long call on a server actor: it ends with an error when the actor's process dies."""

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


class IngestorActor(_Watched, TrajectoryIngestor):
    def __init__(self, job: JobSpec):
        enter_component("ingestor", job.run.dir)
        ledger = job.run.dir / LEDGER_FILE
        self._lock = wait_for_lock(ledger.with_suffix(".lock"), FORMER_INGESTOR_S)
        super().__init__(ledger, job.ingest)


class GatewayActor(_Watched, MultiModelGatewayRouter):
    def __init__(self, job: JobSpec, ingestor: Any, number: int, control_key: str):
        enter_component("gateway" if job.gateway.processes == 1 else f"gateway-{number}", job.run.dir)
        port = job.gateway.port + number if job.gateway.port else 0
        spec = job.gateway.model_copy(update={"control_key": control_key, "port": port})
        sink = IngestorSink(ingestor)
        share = job.workflow.team_share
        super().__init__(spec, job.agent_model_mapping, list(job.models), sink, sink.hungry, team_share=share)
        calm_collector()


class WorkflowDriverActor(_Watched, WorkflowDriver):
    def __init__(self, job: JobSpec, ingestor: Any, gateway_urls: Sequence[str], control_key: str):
        enter_component("workflow-driver", job.run.dir)
        from .workflows.dataset import load_tasks
        from .workflows.loader import load_workflow_class
        from .workflows.scoring import load_reward_function

        workflow = load_workflow_class(job.workflow.name, job.workflow.path)(**job.workflow.kwargs)
        data = job.data.model_dump() | {"seed": job.run.seed if job.data.seed is None else job.data.seed}
        function = job.reward.custom_reward_function
        scorer = function.path and load_reward_function(function.path, function.name, function.reward_kwargs)
        super().__init__(
            job.workflow,
            workflow,
            load_tasks(data, scorer=scorer),
            GatewayControlClient(gateway_urls, control_key),
            ingestor,
            eval_tasks=load_tasks(data, "val", scorer) if job.data.val_files else None,
            validation=job.validation,
            run_dir=Path(job.run.dir),
            shuffle=job.data.shuffle,
            seed=data["seed"],
            max_tasks=job.stop.tasks if job.stop.by == "tasks" else None,
            policies=len(job.models),
            poll_s=job.ingest.poll_s,
        )


def _create(actor_class: type, concurrency: int, *args: Any) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_concurrency=concurrency)(actor_class)
    return actor.options(scheduling_strategy=here).remote(*args)


def create_ingestor(job: JobSpec) -> Any:
    return _create(IngestorActor, SERVER_CALLS, job)


def create_gateways(job: JobSpec, ingestor: Any) -> GatewayGroup:
    key = job.gateway.control_key or secrets.token_urlsafe(32)
    numbers = range(job.gateway.processes)
    return GatewayGroup([_create(GatewayActor, SERVER_CALLS, job, ingestor, n, key) for n in numbers], key)


def create_runtime(job: JobSpec, model_id: str, ingestor: Any, gateways: Sequence[Any]) -> Any:
    policy, poll_s = job.models[model_id], job.ingest.poll_s
    parts = (policy, job.gateway, job.checkpoint, ingestor, gateways, job.run.dir, poll_s)
    return _create(ModelAsyncRuntime, RUNTIME_THREADS, *parts)


def create_workflow_driver(job: JobSpec, ingestor: Any, gateway_urls: Sequence[str], control_key: str) -> Any:
    return _create(WorkflowDriverActor, SERVER_CALLS, job, ingestor, gateway_urls, control_key)
