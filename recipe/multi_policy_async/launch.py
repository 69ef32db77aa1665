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
"""Creates the job's actors. Control actors ask for no CPU: they would only displace trainer ranks."""

from typing import Any

import ray

from .configuration.schema import JobSpec
from .model_async_runtime import ModelAsyncRuntime
from .multi_model_gateway_router import MultiModelGatewayRouter
from .trajectory_ingestor import TrajectoryIngestor
from .workflow_driver import WorkflowDriver

RUNTIME_THREADS = 4  # fit, next_reports, stop, and one to spare


def create_runtime(job: JobSpec, model_id: str, ingestor: Any, gateways: list[Any]) -> Any:
    """The process of one model."""
    actor = ray.remote(num_cpus=0, max_concurrency=RUNTIME_THREADS)(ModelAsyncRuntime)
    return actor.remote(job.models[model_id], job.gateway, ingestor, gateways, job.run.dir)
