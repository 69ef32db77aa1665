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
"""uvicorn inside a process that has its own signal handling, with bounded requests."""

import asyncio
import contextlib
import functools
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http_io import LATE_AFTER_S

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpServer:
    """Serves one ASGI application in the running loop.

    Args:
        port: 0 for any free one.
        max_head_bytes: a request line with headers beyond this ends the connection.
        request_timeout_s: a request that is not whole so long after it began is given up, and so is an answer that
            nobody takes.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, max_head_bytes: int, request_timeout_s: float) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._protocol = functools.partial(
            _BoundedProtocol, max_head_bytes=max_head_bytes, request_timeout_s=request_timeout_s
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen.

        Returns:
            The base URL.

        Raises:
            OSError: the address cannot be bound, or the server does not come up.
        """
        listener = _listen(self._host, self._port)
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            self._app,
            http=self._protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError(f"the server ended at its start on {host}:{port}")
            if asyncio.get_running_loop().time() > deadline:
                raise OSError(f"the server did not start within {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.005)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Stop listening; open requests have a bounded time to end."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._serving], timeout=_STOP_TIMEOUT_S)
        if not done:
            self._serving.cancel()
        self._server = self._serving = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds it has not: on a request's head, and on the time until it is whole or its answer is taken.

    A head that is late ends the connection, and so does the rest of a body that was answered unread. Who waits for a
    late body is told, see ``read_body``. Nothing is late while an earlier answer is under way. A request that comes in
    one piece, as nearly all do, starts no timer. Who leaves an answer unread until the buffers are full, and then for
    that time too, has left.

    An offer of another protocol is ignored, as RFC 9110 (7.8) allows: Java's HTTP client offers HTTP/2 with each
    request, and the parser would take the body of such a request for that protocol's.
    """

    def __init__(self, *args: Any, max_head_bytes: int, request_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head_bytes = max_head_bytes
        self._request_timeout_s = request_timeout_s
        self._in_head = True
        self._head_bytes = 0
        self._whole = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_JoinedWrites(transport))
        # A connection that says nothing is idle from the beginning.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._unread is not None:
            self._unread.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def _watch_unread(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._request_timeout_s, self._check_unread, size)

    def _check_unread(self, size: int) -> None:
        if self.transport.get_write_buffer_size() < size:
            self._watch_unread()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        if self._in_head or self._whole:  # a head, or its beginning; no JSON holds this line, if a body is behind
            data = _UPGRADE.sub(b"\r\nignored:", data)
        if self._in_head:
            self._head_bytes += len(data)
        self._whole = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > self._max_head_bytes:
            self._refuse(b"431 Request Header Fields Too Large")
        elif not self._whole and self._timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._in_head, self._whole = True, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._whole = True
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._whole:  # the next request is being sent, or the rest of an unread body: nothing waits for it now
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._request_timeout_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            if self._in_head:
                self._refuse(b"408 Request Timeout")
            else:
                self.transport.close()
        elif not self._in_head and not self.pipeline:
            self.scope["state"][LATE_AFTER_S] = self._request_timeout_s
            self.cycle.message_event.set()  # wakes who waits for the body

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
        self.transport.close()


class _JoinedWrites:
    """A transport that sends what is written in one turn of the loop at once.

    uvicorn writes an answer's head and body apart; each write is a system call and may wake the client by itself.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)

    def _send(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._transport.write(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, or asyncio leaves Nagle's algorithm on and an answer's body waits 40 ms behind its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"the gateway cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
