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
"""The gateway's sockets."""

import asyncio
import socket

from ..gateway.http_server import HttpServer, _JoinedWrites


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    """Nagle's algorithm would hold the second write of every answer for up to 40 ms."""
    delays = []

    async def app(scope, receive, send):
        connection = next(iter(server._server.server_state.connections))
        accepted = connection.transport.get_extra_info("socket")
        delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    server = HttpServer(app, "127.0.0.1", 0, max_head_bytes=65536)

    async def run():
        url = await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET / HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        await server.stop()

    asyncio.run(run())
    assert delays == [False]


class RecordingTransport:
    def __init__(self):
        self.seen = []

    def write(self, data):
        self.seen.append(data)

    def close(self):
        self.seen.append("closed")


def test_head_and_body_of_an_answer_are_sent_at_once():
    async def run():
        transport = RecordingTransport()
        joined = _JoinedWrites(transport)
        joined.write(b"head")
        joined.write(b"body")
        await asyncio.sleep(0)
        joined.write(b"next")
        await asyncio.sleep(0)
        return transport.seen

    assert asyncio.run(run()) == [b"headbody", b"next"]


def test_a_connection_that_closes_sends_the_rest_first():
    async def run():
        transport = RecordingTransport()
        joined = _JoinedWrites(transport)
        joined.write(b"last")
        joined.close()
        await asyncio.sleep(0)
        return transport.seen

    assert asyncio.run(run()) == [b"last", "closed"]
