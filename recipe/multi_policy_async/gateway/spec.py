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
"""Types and bounds of the ``gateway`` section. Every default is in config/gateway/default.yaml, none here."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class ConcurrencySpec(BaseModel):
    """How many calls of one model are at its servers at once (gateway/concurrency.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_in_flight: Count | None
    """None: no limit."""
    adaptive: bool
    """Follow the servers' load between ``min_in_flight`` and ``max_in_flight``."""
    min_in_flight: Count
    """Where an adaptive limit starts, and its least."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ConcurrencySpec":
        if self.adaptive and self.max_in_flight is None:
            raise ValueError("adaptive concurrency needs a bound: set max_in_flight")
        if self.adaptive and self.min_in_flight > self.max_in_flight:
            raise ValueError(f"min_in_flight {self.min_in_flight} is above max_in_flight {self.max_in_flight}")
        return self


class GatewaySpec(BaseModel):
    """The gateway's settings; see config/gateway/default.yaml for what each one does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["multi_model_router"]
    upstream: Literal["sglang_router", "verl_client"]
    router: Literal["sglang_router", "smg"]
    router_policy: str
    processes: Annotated[int, Field(ge=1, le=64)]
    host: str
    port: Annotated[int, Field(ge=0, le=65535)]
    control_key: str | None
    sampling: Literal["enforce", "refuse"]
    constrained: Literal["refuse", "exclude"]
    model_names: Literal["any", "strict"]
    rows: Literal["per_call", "merged"]

    request_timeout_s: Annotated[float, Field(gt=0)]
    hold_timeout_s: Seconds
    retry_after_s: Annotated[int, Field(ge=1, le=60)]
    slot_timeout_s: Annotated[float, Field(gt=0)]
    adapt_every_s: Annotated[float, Field(gt=0)]
    drain_timeout_s: Seconds
    retry_grace_s: Seconds
    finalize_grace_s: Seconds
    workflow_idle_s: Annotated[float, Field(gt=0)] | None

    connect_timeout_s: Annotated[float, Field(gt=0)]
    read_timeout_s: Annotated[float, Field(gt=0)]
    upstream_retries: Annotated[int, Field(ge=0, le=5)]
    max_resumes: Count

    max_body_bytes: Count
    max_header_bytes: Annotated[int, Field(ge=1024)]
    max_open_workflows: Count
    max_closed_workflows: Count
    max_calls_per_workflow: Count
    max_choices: Count
    max_images: Count
    max_image_bytes: Count
    max_image_pixels: Count
    image_hosts: list[str]

    @model_validator(mode="after")
    def _a_port_for_every_process(self) -> "GatewaySpec":
        if self.port and self.port + self.processes - 1 > 65535:
            raise ValueError(f"port {self.port} leaves no room for {self.processes} processes, one port each")
        return self
