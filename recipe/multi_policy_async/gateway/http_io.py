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
"""Small ASGI helpers of the hot path: bounded bodies, JSON answers, event streams, and noticing who left."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .checks import parse_json
from .errors import BadRequest, BodyTooLarge, GatewayError, RequestTimeout

Headers = list[tuple[bytes, bytes]]
LATE_AFTER_S = "late_after_s"  # in a scope's state: the server gives the request up, which began so long ago
_T = TypeVar("_T")


class ClientLeft(Exception):
    """The connection closed before the answer was out."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLarge: more than ``limit`` bytes; the rest is not read.
        RequestTimeout: the rest does not come.
        ClientLeft: the connection closed meanwhile.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the request body is larger than {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if (late_after_s := scope.get("state", {}).get(LATE_AFTER_S)) is not None:
            raise RequestTimeout(f"the request was not whole within {late_after_s:g} s")


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        BadRequest: it is not JSON, or not an object.
    """
    try:
        parsed = parse_json(body)
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def header(scope: Scope, name: bytes) -> str | None:
    """A request header, ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def error_body(scope: Scope, error: GatewayError) -> dict[str, Any]:
    """An error in the shape of the provider whose client asks: Anthropic's names itself, if not by the path."""
    anthropic = "/v1/messages" in scope["path"] or header(scope, b"anthropic-version") is not None
    return error.anthropic_body() if anthropic else error.openai_body()


def header_safe(text: str) -> bytes:
    """Text as a header value; characters that cannot stand in one are replaced."""
    return text.encode("ascii", "replace").translate(None, b"\r\n\0")


async def send_json(send: Send, status: int, content: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """One complete JSON answer."""
    body = orjson.dumps(content)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


def json_response(content: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> Response:
    """The same for routes that return a response."""
    texts = {name.decode(): value.decode() for name, value in headers}
    return Response(orjson.dumps(content), status, texts, media_type="application/json")


class LeaveWatcher:
    """Knows when the client closes its connection while an answer is in the making.

    Use as an async context manager around the wait, after the body was read. Leaving cancels the waiting task, as
    ``asyncio.timeout`` does, so that a wait needs no task of its own.
    """

    def __init__(self, receive: Receive) -> None:
        self._waiting: asyncio.Task[Any] | None = None
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._waiting is not None:
            self._waiting.cancel()

    async def __aenter__(self) -> "LeaveWatcher":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        self._task = None  # a cancelled task holds its frame, and that this: a circle

    @property
    def left(self) -> bool:
        """Within the context."""
        return self._task.done()

    async def wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await something that ends, or the client's leaving, which cancels it.

        Raises:
            ClientLeft: the client left first.
        """
        if self.left:
            coroutine.close()
            raise ClientLeft
        self._waiting = asyncio.current_task()
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.left and self._waiting.uncancel() == 0:
                raise ClientLeft from None
            raise
        finally:
            self._waiting = None


async def send_event_stream(
    send: Send, watcher: LeaveWatcher, pieces: AsyncIterator[bytes], headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Server-sent events; each piece holds one or more whole events.

    Raises:
        ClientLeft: the client left before the last byte.
    """
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                *headers,
            ],
        }
    )
    async for piece in pieces:
        if watcher.left:
            raise ClientLeft
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if watcher.left:
        raise ClientLeft
    await send({"type": "http.response.body", "body": b""})
