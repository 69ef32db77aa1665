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
"""The routes that agents call, as plain ASGI: one request in, one exchange read to its end or left behind."""

import functools
import hashlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .anthropic_lowering import lower_messages
from .anthropic_raising import MessageWriter
from .call import Exchange
from .completions_lowering import lower_completion
from .completions_raising import CompletionWriter
from .errors import BadRequest, GatewayError, NotFound
from .history import answer_of
from .http_io import ClientLeft, LeaveWatcher, error_body, header, parse_object, read_body, send_event_stream, send_json
from .metadata import metadata_headers
from .off_loop import LONG_BODY, off_loop
from .openai_lowering import lower_chat
from .openai_raising import ChatCompletionWriter
from .request import AgentRequest, Message
from .responses_lowering import lower_responses
from .responses_raising import ResponseWriter
from .service import GatewayService
from .session import WorkflowSession

logger = logging.getLogger(__name__)


Writer = ChatCompletionWriter | CompletionWriter | MessageWriter | ResponseWriter


class AgentEndpoint:
    """Base of the agent routes: who calls, provider-shaped errors, and never a 500."""

    def __init__(self, service: GatewayService, check_key: Callable[[Scope], None]) -> None:
        self.service = service
        self._check_key = check_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.answer(scope, receive, tracked_send)
        except ClientLeft:
            logger.debug("client left: %s", scope["path"])
        except GatewayError as error:
            await self._send_error(scope, send, error, started)
        except Exception:
            # A bug of ours; see the error model for why it is a 503, which is counted where it is sent.
            logger.exception("request to %s failed", scope["path"])
            await self._send_error(scope, send, GatewayError("internal error of the gateway"), started)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _send_error(self, scope: Scope, send: Send, error: GatewayError, started: bool) -> None:
        self.service.metrics.error(error.code)
        if not started:
            await send_json(send, error.status, error_body(scope, error), error.headers())

    def identify(self, scope: Scope) -> tuple[WorkflowSession, str]:
        """The workflow and agent that call: from the minted URL, or from headers together with the control key.

        Raises:
            GatewayError: unknown, closed, or without the right key.
        """
        params = scope["path_params"]
        if "token" in params:
            return self.service.sessions.by_token(params["token"]), params["agent_id"]
        self._check_key(scope)
        workflow_id, agent_id = header(scope, b"x-workflow-id"), header(scope, b"x-agent-id")
        if workflow_id is None or agent_id is None:
            raise BadRequest("this URL names no agent: give the headers x-workflow-id and x-agent-id")
        return self.service.sessions.by_id(workflow_id), agent_id


class GenerationEndpoint(AgentEndpoint):
    """A route that samples: protocols differ in ``lower`` and ``writer`` only."""

    protocol = b"openai"

    def lower(self, body: dict[str, Any], session: WorkflowSession, agent_id: str) -> AgentRequest:
        return lower_chat(body, max_choices=self.service.spec.max_choices)

    def writer(self, exchange: Exchange) -> Writer:
        return ChatCompletionWriter(exchange, self.service.model(exchange.model_id).tokenizer)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, agent_id = self.identify(scope)
        model_id = self.service.route(agent_id)
        session.check_open()
        body = await read_body(scope, receive, self.service.spec.max_body_bytes)
        digest = hashlib.blake2b(body, digest_size=16, person=self.protocol).digest()
        with session.in_use():
            async with LeaveWatcher(receive) as watcher:
                try:
                    exchange = await self._exchange(scope, session, agent_id, body, digest, watcher)
                except ClientLeft:
                    session.retries.note_unanswered(agent_id, digest)
                    raise
                except GatewayError as error:
                    if error.retry:
                        session.retries.note_unanswered(agent_id, digest)
                    self.service.metrics.request(model_id, error.status)
                    raise
                await self._read(session, exchange, watcher, send)

    async def _exchange(
        self,
        scope: Scope,
        session: WorkflowSession,
        agent_id: str,
        body: bytes,
        digest: bytes,
        watcher: LeaveWatcher,
    ) -> Exchange:
        """The exchange to read: the one that a marked retry joins, else a new one."""
        if (header(scope, b"x-stainless-retry-count") or "0") != "0":
            joined = session.retries.find(agent_id, digest)
            if joined is not None:
                self.service.metrics.joined(joined.model_id)
                return joined
        request = await watcher.wait(off_loop(len(body) > LONG_BODY, self._request, body, session, agent_id))
        return await watcher.wait(self.service.start_exchange(session, agent_id, request, digest))

    def _request(self, body: bytes, session: WorkflowSession, agent_id: str) -> AgentRequest:
        request = self.lower(parse_object(body), session, agent_id)
        request.body_bytes = len(body)
        return request

    async def _read(self, session: WorkflowSession, exchange: Exchange, watcher: LeaveWatcher, send: Send) -> None:
        delivered = False
        session.reader_came(exchange)
        try:
            # The status of a stream is known with its first event: until then an error can still be a proper one.
            await watcher.wait(exchange.wait_beyond(0) if exchange.request.stream else exchange.wait_ended())
            if exchange.error is not None and not (exchange.request.stream and exchange.events):
                self.service.metrics.request(exchange.model_id, exchange.error.status)
                raise exchange.error
            await self._write(exchange, watcher, send)
            delivered = exchange.error is None and not watcher.left
            self.service.metrics.request(exchange.model_id, 200 if exchange.error is None else exchange.error.status)
        finally:
            session.reader_went(exchange, delivered=delivered)

    async def _write(self, exchange: Exchange, watcher: LeaveWatcher, send: Send) -> None:
        writer = self.writer(exchange)
        if exchange.request.stream:
            await send_event_stream(send, watcher, writer.stream(), metadata_headers(exchange, versions=False))
        else:
            await send_json(send, 200, writer.whole(), metadata_headers(exchange, versions=True))


class CompletionsEndpoint(GenerationEndpoint):
    """OpenAI's POST .../v1/completions."""

    protocol = b"completions"

    def lower(self, body: dict[str, Any], session: WorkflowSession, agent_id: str) -> AgentRequest:
        return lower_completion(body, max_choices=self.service.spec.max_choices)

    def writer(self, exchange: Exchange) -> Writer:
        return CompletionWriter(exchange, self.service.model(exchange.model_id).tokenizer)


class ResponsesEndpoint(GenerationEndpoint):
    """OpenAI's POST .../v1/responses."""

    protocol = b"responses"

    def lower(self, body: dict[str, Any], session: WorkflowSession, agent_id: str) -> AgentRequest:
        return lower_responses(body, functools.partial(self._conversation, session, agent_id))

    @staticmethod
    def _conversation(session: WorkflowSession, agent_id: str, response_id: str) -> list[Message]:
        exchange = session.find_exchange(agent_id, response_id.removeprefix("resp_"))
        if exchange is None or not exchange.request.messages or not exchange.ended or exchange.error is not None:
            raise NotFound("response", response_id)
        return [*exchange.request.messages[exchange.request.own_messages :], answer_of(exchange.calls[0])]

    def writer(self, exchange: Exchange) -> Writer:
        return ResponseWriter(exchange)


class MessagesEndpoint(GenerationEndpoint):
    """Anthropic's POST .../v1/messages."""

    protocol = b"anthropic"

    def lower(self, body: dict[str, Any], session: WorkflowSession, agent_id: str) -> AgentRequest:
        return lower_messages(body)

    def writer(self, exchange: Exchange) -> Writer:
        return MessageWriter(exchange)


class CountTokensEndpoint(AgentEndpoint):
    """Anthropic's POST .../v1/messages/count_tokens."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, agent_id = self.identify(scope)
        body = await read_body(scope, receive, self.service.spec.max_body_bytes)
        request = await off_loop(len(body) > LONG_BODY, self._request, body)
        count = await self.service.count_tokens(session, agent_id, request)
        await send_json(send, 200, {"input_tokens": count})

    @staticmethod
    def _request(body: bytes) -> AgentRequest:
        request = lower_messages({"max_tokens": 1, **parse_object(body)})
        request.body_bytes = len(body)
        return request


class ModelsEndpoint(AgentEndpoint):
    """GET .../v1/models and .../v1/models/{id}: the one model behind this agent, as both providers describe one."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, agent_id = self.identify(scope)
        model_id = self.service.route(agent_id)
        model = {
            "id": model_id,
            "object": "model",
            "created": int(session.started_at),
            "owned_by": "multi_policy_async",
            "type": "model",
            "display_name": model_id,
            "created_at": datetime.fromtimestamp(int(session.started_at), UTC).isoformat(),
            "lifecycle": "active",
        }
        asked = scope["path_params"].get("model_id")
        if asked is None:
            page = {"has_more": False, "first_id": model_id, "last_id": model_id}
            await send_json(send, 200, {"object": "list", "data": [model], **page})
        elif asked == model_id:
            await send_json(send, 200, model)
        else:
            raise NotFound("model", asked, [model_id])


class RewardsEndpoint(AgentEndpoint):
    """POST .../v1/rewards: an agent, or whoever judges it, reports rewards without the control key."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, agent_id = self.identify(scope)
        self.service.route(agent_id)
        body = await read_body(scope, receive, self.service.spec.max_body_bytes)
        body = await off_loop(len(body) > LONG_BODY, parse_object, body)
        if len(body) != 1 or not body.keys() <= {"reward", "rewards"}:
            raise BadRequest('the body must be {"reward": <this agent\'s>} or {"rewards": <in any form>}')
        rewards = {agent_id: body["reward"]} if "reward" in body else body["rewards"]
        session.report_rewards(rewards, self.service.routes.agents)
        await send_json(send, 200, session.status())


def agent_routes(service: GatewayService, check_key: Callable[[Scope], None]) -> list[Route]:
    """Both ways to name the agent: the minted URL, and headers with the control key."""
    endpoints = [
        ("/v1/chat/completions", GenerationEndpoint(service, check_key), "POST"),
        ("/v1/completions", CompletionsEndpoint(service, check_key), "POST"),
        ("/v1/responses", ResponsesEndpoint(service, check_key), "POST"),
        ("/v1/messages", MessagesEndpoint(service, check_key), "POST"),
        ("/v1/messages/count_tokens", CountTokensEndpoint(service, check_key), "POST"),
        ("/v1/models", ModelsEndpoint(service, check_key), "GET"),
        ("/v1/models/{model_id:path}", ModelsEndpoint(service, check_key), "GET"),
        ("/v1/rewards", RewardsEndpoint(service, check_key), "POST"),
    ]
    return [
        Route(prefix + path, endpoint=endpoint, methods=[method], name=f"{prefix}{path}")
        for path, endpoint, method in endpoints
        for prefix in ("/w/{token}/agents/{agent_id}", "")
    ]
