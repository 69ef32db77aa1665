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
"""uvicorn inside a process that has its own signal handling, with bounded request heads."""

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class HttpServer:
    """Serves one ASGI application in the running loop.

    Args:
        port: 0 for any free one.
        max_head_bytes: a request line with headers beyond this ends the connection.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, max_head_bytes: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._max_head_bytes = max_head_bytes
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
            http=_protocol(self._max_head_bytes),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
            h11_max_incomplete_event_size=self._max_head_bytes,
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


def _protocol(max_head_bytes: int) -> Any:
    """httptools, whose parser has no bound of its own, with one; h11, which has one, where it is not installed."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeadProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(_JoinedWrites(transport))

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > max_head_bytes and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            super().on_headers_complete()

    return BoundedHeadProtocol


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
