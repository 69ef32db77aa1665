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
"""The gateway's sockets: answers leave at once, and requests that never become whole are given up."""

import asyncio
import contextlib
import json
import socket
from contextlib import asynccontextmanager, contextmanager

import pytest

from ..gateway.http_server import HttpServer, _JoinedWrites
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import ALPHABET, one_model, slow

W = "e0-t0-s0-a0"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}).encode()
WHOLE = b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    """Nagle's algorithm would hold the second write of every answer for up to 40 ms."""
    delays = []

    async def app(scope, receive, send):
        connection = next(iter(server._server.server_state.connections))
        accepted = connection.transport.get_extra_info("socket")
        delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    server = HttpServer(app, "127.0.0.1", 0, max_head_bytes=65536, request_timeout_s=60)

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


class Connection:
    """One connection to a gateway, and the path of its planner."""

    def __init__(self, world, agent, reader, writer):
        self.agent, self.key = agent, world.router.control_key
        self._reader, self._writer = reader, writer

    def send(self, data):
        self._writer.write(data)

    def ask(self, rest=WHOLE, path="/v1/chat/completions", method="POST"):
        self.send(f"{method} {self.agent}{path} HTTP/1.1\r\nhost: gateway\r\n".encode() + rest)

    async def answer(self):
        """Status, headers and JSON of the next answer."""
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 5)).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(head.split()[1]), headers, json.loads(body or b"null")

    @property
    def heard(self):
        """Whether something came that nobody has read, or the end."""
        return bool(self._reader._buffer) or self._reader.at_eof()

    async def rest(self):
        """What comes until the gateway closes the connection."""
        return await asyncio.wait_for(self._reader.read(), 5)


@asynccontextmanager
async def connections(folder, engine, number=1, **spec):
    """A gateway, and connections to it."""
    async with one_model(folder, engine, **spec) as world:
        agent = (await world.open(W))["planner"].anthropic_base_url.removeprefix(world.base_url)
        port = int(world.base_url.rsplit(":", 1)[1])
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
        yield [Connection(world, agent, *stream) for stream in streams]
        for _, writer in streams:
            writer.close()


@contextmanager
def dribbling(connection, data):
    """Sends a little again and again, or nothing, until the gateway says something.

    What is sent to a connection that is closed already resets it, and its last answer may be lost: so whatever the
    gateway does at the same moment must have come over first.
    """

    async def dribble():
        while not connection.heard:
            connection.send(data)
            await asyncio.sleep(0.02)
            for _ in range(20):
                await asyncio.sleep(0)

    task = asyncio.create_task(dribble())
    yield
    task.cancel()


OPENAI, ANTHROPIC = {"message", "type", "param", "code"}, {"message", "type"}
SHAPES = {
    "/v1/chat/completions": OPENAI,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/rewards": OPENAI,
    "/control/v1/workflows": OPENAI,
}


@pytest.mark.parametrize("dribble", [b"", b" "])
def test_a_body_that_never_ends_gets_a_408_and_the_session_lives_on(folder, texts, dribble):  # invariants 9, 10
    async def stalled(connection, path):
        connection.send(f"POST {'' if path.startswith('/control') else connection.agent}{path} HTTP/1.1\r\n".encode())
        connection.send(f"authorization: Bearer {connection.key}\r\ncontent-length: 1000\r\n\r\n{{".encode())
        with dribbling(connection, dribble):
            return *await connection.answer(), await connection.rest()

    async def run():
        engine = FakeEngine(texts.says("fine"))
        async with connections(folder, engine, len(SHAPES) + 1, request_timeout_s=0.15) as (other, *these):
            answers = await asyncio.gather(*map(stalled, these, SHAPES))
            other.ask()
            return answers, await other.answer()

    answers, (fine, _, _) = asyncio.run(run())
    for (status, headers, body, rest), shape in zip(answers, SHAPES.values(), strict=True):
        assert (status, headers["connection"], headers["x-should-retry"], rest) == (408, "close", "false", b"")
        assert set(body["error"]) == shape and "0.15 s" in body["error"]["message"]
    assert fine == 200


@pytest.mark.parametrize("dribble", [b"", b"y"])
def test_a_head_that_never_ends_closes_the_connection(folder, texts, dribble):  # invariant 10
    async def stalled(connection, answered_before):
        if answered_before:
            connection.ask(b"\r\n", "/v1/models", "GET")
            await connection.answer()
        connection.send(b"POST /w/x HTTP/1.1\r\nx-slow: ")
        with dribbling(connection, dribble):
            return await connection.rest()

    async def run():
        async with connections(folder, FakeEngine(texts.says("fine")), 2, request_timeout_s=0.15) as both:
            return await asyncio.gather(*map(stalled, both, (False, True)))

    assert [rest.split(b"\r\n")[0] for rest in asyncio.run(run())] == [b"HTTP/1.1 408 Request Timeout"] * 2


def test_a_connection_that_was_answered_without_its_body_is_closed_when_the_rest_does_not_come(folder, texts):
    async def run():
        async with connections(folder, FakeEngine(texts.says("fine")), request_timeout_s=0.15) as [connection]:
            connection.ask(b"content-length: 10\r\n\r\nx", "/v1/models", "GET")
            return await connection.answer(), await connection.rest()

    (status, _, _), rest = asyncio.run(run())
    assert (status, rest) == (200, b"")


def test_an_offer_to_go_on_in_http_2_is_ignored(folder, texts):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"  # Java's

    async def run():
        async with connections(folder, FakeEngine(texts.says("plan"))) as [connection]:
            answers = []
            for rest in (offer + WHOLE, WHOLE, offer + WHOLE):
                connection.ask(rest)
                answers.append(await connection.answer())
            connection.ask(offer)  # the head first, the body behind it
            await asyncio.sleep(0.05)
            connection.send(WHOLE)
            return [*answers, await connection.answer()]

    for status, _, answer in asyncio.run(run()):
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "plan")


def test_idle_connections_and_answers_that_take_longer_are_not_given_up(folder, texts):
    async def run():
        async with connections(folder, slow(texts), request_timeout_s=0.02) as [connection]:  # an answer takes 0.1 s
            connection.ask()
            first = await connection.answer()
            await asyncio.sleep(0.1)
            connection.ask()
            return first, await connection.answer()

    assert [status for status, _, _ in asyncio.run(run())] == [200, 200]


@pytest.mark.parametrize("sent", ["a part of its head", "a part of its body"])
def test_a_request_that_waits_behind_an_answer_is_not_given_up_for_that(folder, texts, sent):
    async def run():
        engine = FakeEngine(texts.says(ALPHABET), token_s=0.02)  # an answer takes half a second
        async with connections(folder, engine, request_timeout_s=0.25) as [connection]:
            connection.ask()
            second = f"POST {connection.agent}/v1/chat/completions HTTP/1.1\r\n".encode() + WHOLE
            cut = 10 if sent == "a part of its head" else -10
            connection.send(second[:cut])
            first = await connection.answer()
            connection.send(second[cut:])
            return first, await connection.answer()

    assert [status for status, _, _ in asyncio.run(run())] == [200, 200]


def test_a_head_that_began_behind_an_answer_is_given_up_once_that_is_out(folder, texts):
    async def run():
        async with connections(folder, slow(texts), request_timeout_s=0.02) as [connection]:  # an answer takes 0.1 s
            connection.ask()
            connection.send(b"POST /w/x")
            return await connection.answer(), await connection.rest()

    (status, _, _), rest = asyncio.run(run())
    assert status == 200 and rest.startswith(b"HTTP/1.1 408")


def test_a_request_in_one_piece_starts_no_timer_and_a_new_connection_counts_as_idle():
    seen = []

    async def app(scope, receive, send):
        seen.append(connection()._timer)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    server = HttpServer(app, "127.0.0.1", 0, max_head_bytes=65536, request_timeout_s=60)

    def connection():
        return next(iter(server._server.server_state.connections), None)

    async def run():
        url = await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        while connection() is None:
            await asyncio.sleep(0.001)
        seen.append(connection().timeout_keep_alive_task is not None)
        writer.write(b"POST / HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n" + WHOLE)
        await reader.read()
        writer.close()
        await server.stop()

    asyncio.run(run())
    assert seen == [True, None]


@pytest.mark.parametrize("reads", [False, True])
def test_who_takes_nothing_of_an_answer_has_left_and_who_reads_gets_all_of_it(reads):  # invariant 10
    ended = asyncio.Event()
    pieces = 30  # of a megabyte: more than fits into the buffers on the way

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(pieces):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    server = HttpServer(app, "127.0.0.1", 0, max_head_bytes=65536, request_timeout_s=0.2)

    async def run():
        url = await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n")
        try:
            if not reads:
                await asyncio.wait_for(ended.wait(), 20)  # what is sent to a connection that is gone is sent at once
            size = 0
            with contextlib.suppress(ConnectionResetError):
                while piece := await reader.read(2**20):
                    size += len(piece)
                    await asyncio.sleep(0 if ended.is_set() else 0.01)  # slower than the time that it has for all
            return size > pieces * 2**20
        finally:
            writer.close()
            await server.stop()

    assert asyncio.run(run()) == reads
