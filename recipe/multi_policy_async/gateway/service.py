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
"""The gateway without HTTP: from an agent's checked request to a running exchange."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from ..agent_model_route_table import AgentModelRouteTable, UnknownAgent
from ..gateway_binding_registry import GatewayBindingRegistry, ModelBinding, ModelState, ModelStatus
from ..rewards import TeamShare
from ..trajectory import Version
from .budget import call_budget
from .call import Call, Exchange
from .closing import Sink, WorkflowCloser
from .errors import NotFound, UnsupportedValue
from .gate import ModelGate
from .generation import ServedModel
from .history import Prompt
from .metrics import GatewayMetrics
from .output_parsing import THINK, CallParser, OutputParser, PlainParser, Reading
from .prompting import build_completion_prompts, build_prompt
from .request import AgentRequest
from .sampling import SamplingDecision, decide_sampling
from .session import WorkflowSession
from .session_store import SessionStore
from .spec import GatewaySpec
from .tokenizer import PolicyTokenizer
from .upstream import Upstream

logger = logging.getLogger(__name__)


class GatewayService:
    """Routes, gates, sessions and models of one gateway."""

    def __init__(
        self,
        spec: GatewaySpec,
        routes: AgentModelRouteTable,
        registry: GatewayBindingRegistry,
        sink: Sink,
        make_upstream: Callable[[GatewaySpec, ModelBinding], Upstream],
        team_share: TeamShare = 0.0,
    ) -> None:
        self.spec = spec
        self.routes = routes
        self.registry = registry
        self.metrics = GatewayMetrics()
        self.sessions = SessionStore(spec, self.metrics)
        self.closer = WorkflowCloser(
            self.sessions, routes, registry, sink, self.metrics, merged=spec.rows == "merged", team_share=team_share
        )
        self._make_upstream = make_upstream
        self._models: dict[str, ServedModel] = {}
        self.gates = {
            model_id: ModelGate(
                model_id,
                hold_timeout_s=spec.hold_timeout_s,
                retry_after_s=spec.retry_after_s,
                metrics=self.metrics,
            )
            for model_id in registry.model_ids
        }

    # -- models --------------------------------------------------------------------------------------------------

    async def bind(self, binding: ModelBinding) -> None:
        """Serve a model, or serve it anew after a restore.

        Raises:
            ValueError: unknown model, or its folder has no usable tokenizer and chat template.
        """
        former = self._models.get(binding.model_id)
        if former is not None and former.binding.model_path == binding.model_path:
            tokenizer = former.tokenizer
        else:
            tokenizer = await asyncio.to_thread(PolicyTokenizer.load, binding.model_path)
        self.registry.bind(binding)
        gate = self.gates[binding.model_id]
        upstream = self._make_upstream(self.spec, binding)
        if former is None:
            self._models[binding.model_id] = ServedModel(binding, tokenizer, gate, upstream, self.spec, self.metrics)
        else:
            await former.rebind(binding, tokenizer, upstream)
        gate.set_state(self.registry.status(binding.model_id).state)

    def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Open or close a model's gate. A status may come before the binding; the gate opens with both.

        Raises:
            ValueError: unknown model.
        """
        self.registry.set_status(model_id, status)
        if model_id in self._models or status.state == ModelState.DOWN:
            self.gates[model_id].set_state(status.state)

    async def drain(self, model_id: str) -> int:
        """See ``ModelGate.drain``.

        Raises:
            ValueError: unknown model.
        """
        status = ModelStatus(ModelState.DRAINING, self.registry.status(model_id).version)
        self.registry.set_status(model_id, status)
        return await self.gates[model_id].drain(self.spec.drain_timeout_s)

    def ready(self, model_id: str) -> bool:
        """Whether a request for the model would pass now."""
        return model_id in self._models and self.gates[model_id].state == ModelState.OPEN

    def model(self, model_id: str) -> ServedModel:
        """A model that is bound."""
        return self._models[model_id]

    def blocked(self, longer_than_s: float) -> dict[str, str]:
        """Workflows with a request that has waited at a closed gate for longer: the model that each waits for."""
        return {
            workflow_id: model_id
            for model_id, gate in self.gates.items()
            for workflow_id in gate.waiting_workflows(longer_than_s)
        }

    async def served(self, model_id: str, workflow_id: str) -> ServedModel:
        """The model, after a bounded wait while its runtime starts.

        Raises:
            Busy, UpstreamFailed: see ``ModelGate.wait_open``.
        """
        if model_id not in self._models:
            await self.gates[model_id].wait_open(workflow_id)
        return self._models[model_id]

    # -- requests ------------------------------------------------------------------------------------------------

    def route(self, agent_id: str) -> str:
        """The model of an agent.

        Raises:
            NotFound: naming the known agents.
        """
        try:
            return self.routes.model_id(agent_id)
        except UnknownAgent as error:
            raise NotFound("agent", agent_id, error.known) from None

    async def start_exchange(
        self, session: WorkflowSession, agent_id: str, request: AgentRequest, digest: bytes
    ) -> Exchange:
        """Render, check and start a request's calls.

        Raises:
            GatewayError: nothing was started.
        """
        model_id = self.route(agent_id)
        self._check_model_name(request, model_id)
        self._check_constraint(request)
        session.check_may_call()
        await session.wait_resumed()
        model = await self.served(model_id, session.workflow_id)
        sampling = self._sampling(session, model.binding, request)
        if request.prompts is None:
            prompts = [await build_prompt(session, model, agent_id, request)]
        else:
            prompts = await build_completion_prompts(session, model, agent_id, request)
        reading = await self._reading(model, request, prompts[0].text)
        merged = self.spec.rows == "merged" and request.n == 1
        # From here on without waiting: other calls would change what is in a row.
        budgets = [call_budget(model.binding, prompt, request.max_tokens, merged=merged) for prompt in prompts]
        for name in sampling.overridden:
            self.metrics.sampling_overridden(model_id, name)
        exchange = session.new_exchange(agent_id, model_id, request, digest)
        for prompt, (budget, bound) in zip(prompts, budgets, strict=True):
            first = len(exchange.calls)
            exchange.calls += [
                self._call(exchange, model, choice, prompt, budget, sampling, reading)
                for choice in range(first, first + request.n)
            ]
            exchange.calls[first].bound = bound
            session.goes_on(exchange.calls[first], prompt)
        session.start(exchange, model.run)
        return exchange

    async def count_tokens(self, session: WorkflowSession, agent_id: str, request: AgentRequest) -> int:
        """Length of the prompt that a request would send.

        Raises:
            GatewayError: as for sending it.
        """
        model = await self.served(self.route(agent_id), session.workflow_id)
        return len((await build_prompt(session, model, agent_id, request)).ids)

    def _call(
        self,
        exchange: Exchange,
        model: ServedModel,
        choice: int,
        prompt: Prompt,
        budget: int,
        sampling: SamplingDecision,
        reading: Reading,
    ) -> Call:
        request = exchange.request
        special_id = model.tokenizer.special_id
        stop_tokens = {token_id: stop for stop in request.stop if (token_id := special_id(stop)) is not None}
        return Call(
            request_id=exchange.exchange_id if choice == 0 else f"{exchange.exchange_id}:{choice}",
            agent_id=exchange.agent_id,
            model_id=exchange.model_id,
            turn=int(exchange.exchange_id.rsplit(":", 1)[1]),
            choice=choice,
            prompt_ids=prompt.ids,
            prompt=prompt,
            max_new_tokens=budget,
            sampling=sampling,
            stop=request.stop,
            new_detokenizer=reading.new_detokenizer,
            new_parser=reading.new_parser,
            emit=exchange.emit,
            stream=request.stream,
            stop_token_ids=tuple(dict.fromkeys((*reading.stop_token_ids, *stop_tokens))),
            top_logprobs=request.top_logprobs if request.logprobs else 0,
            stop_tokens=stop_tokens,
        )

    def _sampling(self, session: WorkflowSession, binding: ModelBinding, request: AgentRequest) -> SamplingDecision:
        evaluation, refuse = session.purpose == "eval", self.spec.sampling == "refuse"
        sampling = decide_sampling(binding, request.asked, evaluation=evaluation, refuse=refuse)
        if request.constraint is not None:
            sampling.constrain(request.constraint.schema)
        return sampling

    def _check_constraint(self, request: AgentRequest) -> None:
        constraint = request.constraint
        if constraint is not None and self.spec.constrained == "refuse":
            # Sampling from a masked distribution would make the log-probs wrong for training.
            raise UnsupportedValue(
                f"{constraint.param} asks for an answer sampled under a grammar, which is no sample of the policy "
                "(gateway.constrained: refuse)",
                param=constraint.param,
            )

    def _check_model_name(self, request: AgentRequest, model_id: str) -> None:
        if self.spec.model_names == "strict" and request.model != model_id:
            raise NotFound("model", str(request.model), [model_id])

    async def _reading(self, model: ServedModel, request: AgentRequest, text: str) -> Reading:
        tokenizer, ends = model.tokenizer, model.tokenizer.end_of_turn_ids
        think = THINK if model.binding.split_reasoning else None
        if request.constraint is not None:
            return Reading(tokenizer.new_detokenizer, CallParser if request.constraint.is_call else PlainParser, ends)
        if request.prompts is not None or (request.tools is None and think is None):
            return Reading(tokenizer.new_detokenizer, PlainParser, ends)
        family = await model.tool_family() if request.tools is not None else None
        marked = (family is not None and family.special_markers) or (think and tokenizer.begins_special(THINK[0]))
        new_parser = functools.partial(
            OutputParser,
            family,
            request.tools or [],
            think,
            thinking=text.rstrip().endswith(THINK[0]),
            parallel=request.parallel_tool_calls,
        )
        return Reading(
            tokenizer.new_marking_detokenizer if marked else tokenizer.new_detokenizer,
            new_parser,
            ends if family is None else (*ends, *family.stop_token_ids),
        )

    # -- life ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """For the job's pipeline line."""
        return {
            "workflows_open": len(self.sessions.open_sessions),
            "models": {
                model_id: {
                    "state": gate.state.value,
                    "version": str(self.registry.status(model_id).version),
                    "running": gate.running,
                    "waiting": gate.waiting,
                    **self._slot_stats(model_id),
                }
                for model_id, gate in self.gates.items()
            },
        }

    def _slot_stats(self, model_id: str) -> dict[str, int | None]:
        slots = self._models[model_id].slots if model_id in self._models else None
        return {"limit": slots and slots.limit, "waiting_for_slot": slots.waiting if slots else 0}

    def models(self) -> list[ServedModel]:
        """The models that are bound."""
        return list(self._models.values())

    async def close(self) -> None:
        """Abandon what runs and release connections. No terminal records: who issued the workflows records them."""
        closing: list[Awaitable[None]] = [s.abandon_all("shutdown") for s in self.sessions.open_sessions]
        await asyncio.gather(*closing)
        await asyncio.gather(*(model.close() for model in self._models.values()))


def make_upstream(spec: GatewaySpec, binding: ModelBinding) -> Upstream:
    """The upstream that the spec asks for.

    Raises:
        ValueError: the binding lacks the router's URL or verl's client.
    """
    unversioned = None if binding.trained else Version(binding.incarnation, 0)
    if spec.upstream == "verl_client":
        from .verl_upstream import VerlClientUpstream

        if binding.verl_client is None:
            raise ValueError(f"model {binding.model_id} has no verl client, which gateway.upstream=verl_client needs")
        return VerlClientUpstream(binding.verl_client, binding.incarnation, answer_timeout_s=spec.read_timeout_s)
    from .sglang_upstream import SglangRouterUpstream

    if binding.router_url is None:
        raise ValueError(f"model {binding.model_id} has no router_url, which gateway.upstream=sglang_router needs")
    return SglangRouterUpstream(
        binding.router_url,
        binding.replica_urls,
        connect_timeout_s=spec.connect_timeout_s,
        read_timeout_s=spec.read_timeout_s,
        unversioned=unversioned,
    )
