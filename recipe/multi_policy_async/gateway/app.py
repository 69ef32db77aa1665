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
"""Assembles the gateway's ASGI application."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .agent_routes import AgentEndpoint, agent_routes
from .control_routes import control_router, health_router, key_checker
from .errors import BadRequest, GatewayError, NotFound
from .http_io import ClientLeft, error_body, json_response, parse_object, read_body, send_json
from .off_loop import LONG_BODY, off_loop
from .openapi import document_agent_routes
from .service import GatewayService


class MethodNotAllowed(GatewayError):
    status = 405
    code = "method_not_allowed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", self.allowed.encode())]


class ControlGuard:
    """Checks the key and bounds the body of control calls before anything of the body is read."""

    def __init__(self, app: ASGIApp, check_key: Callable[[Scope], None], service: GatewayService) -> None:
        self._app = app
        self._check_key = check_key
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/control/"):
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await read_body(scope, receive, self._service.spec.max_body_bytes)
            if body:  # stricter than FastAPI's parser: what cannot be written down again is refused here
                await off_loop(len(body) > LONG_BODY, parse_object, body)
        except GatewayError as error:
            self._service.metrics.error(error.code)
            await send_json(send, error.status, error.openai_body(), error.headers())
            return
        except ClientLeft:
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)


class AgentsFirst:
    """Answers agents before the framework's layers, which would cost a fifth of a call; what is no agent's goes on."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._routes = [
            route
            for route in app.router.routes
            if isinstance(route, Route) and isinstance(route.endpoint, AgentEndpoint)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self._routes:
                match, found = route.matches(scope)
                if match == Match.FULL:
                    await route.endpoint({**scope, **found}, receive, send)
                    return
        await self._app(scope, receive, send)


def create_app(service: GatewayService, control_key: str) -> FastAPI:
    """The agent routes, the control API, probes and metrics."""
    app = FastAPI(title="multi_policy_async gateway", docs_url=None, redoc_url=None, redirect_slashes=False)
    check_key = key_checker(control_key)
    app.add_middleware(ControlGuard, check_key=check_key, service=service)
    app.router.routes.extend(agent_routes(service, check_key))
    app.include_router(control_router(service))
    app.include_router(health_router(service))
    document_agent_routes(app)

    def shaped(request: Request, error: GatewayError) -> Response:
        service.metrics.error(error.code)
        return json_response(error_body(request.scope, error), error.status, error.headers())

    @app.exception_handler(GatewayError)
    async def gateway_error(request: Request, error: GatewayError) -> Response:
        return shaped(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return shaped(request, BadRequest(f"{where or 'body'}: {first['msg']}", param=where or None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return shaped(request, NotFound("path", request.url.path))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return shaped(request, MethodNotAllowed(f"{request.method} is not allowed here", allowed=allowed))
        return shaped(request, BadRequest(str(error.detail)))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return shaped(
            request, GatewayError("internal error of the gateway")
        )  # logged by the server, to which it goes on

    return app
