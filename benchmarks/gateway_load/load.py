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
"""Load on one HTTP address: closed loop (so many at once) and open loop (so many per second, whatever comes back)."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import numpy as np


@dataclass(slots=True)
class Request:
    """One request, ready to be written to a socket, and what its answer must hold."""

    address: tuple[str, int]
    data: bytes
    expected: tuple[bytes, ...]


def post(url: str, body: bytes, expected: tuple[bytes, ...]) -> Request:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return Request((parts.hostname, parts.port), head.encode() + body, expected)


@dataclass
class Outcome:
    """Of the requests of one phase: seconds each, and what was wrong."""

    seconds: list[float] = field(default_factory=list)
    not_2xx: int = 0
    misrouted: int = 0
    wall_s: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.wall_s

    def quantile_ms(self, quantile: float) -> float:
        return 1e3 * float(np.quantile(self.seconds, quantile))


class _Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes, float]] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, data: bytes) -> asyncio.Future[tuple[int, bytes, float]]:
        """Status (0: the connection was lost), body and time of the last byte."""
        self._parser, self._body = httptools.HttpResponseParser(self), []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body), time.perf_counter()))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((0, b"", time.perf_counter()))

    def close(self) -> None:
        self._transport.close()


class Client:
    """Connections that are kept and used again."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def send(self, request: Request, outcome: Outcome, due: float | None = None) -> None:
        """Send one request and check its answer.

        Args:
            due: when it should have been sent, if that is what its seconds count from.
        """
        idle = self._idle.setdefault(request.address, [])
        while idle and idle[-1].lost:  # servers close what was idle for long; nothing would ever answer there
            idle.pop()
        if idle:
            connection = idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, *request.address)
        started = time.perf_counter() if due is None else due
        status, body, ended = await connection.send(request.data)
        if status:
            idle.append(connection)
        outcome.seconds.append(ended - started)
        outcome.not_2xx += not 200 <= status < 300
        outcome.misrouted += status == 200 and not all(part in body for part in request.expected)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()


async def at_once(concurrency: int, steps: Iterable[Callable[[Outcome], Awaitable[None]]]) -> Outcome:
    """Closed loop: ``concurrency`` workers, each takes the next step when its last one has ended."""
    outcome, waiting = Outcome(), iter(steps)

    async def worker() -> None:
        for step in waiting:
            await step(outcome)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    outcome.wall_s = time.perf_counter() - started
    return outcome


async def per_second(client: Client, rate: float, requests: list[Request], seed: int) -> Outcome:
    """Open loop: Poisson arrivals; seconds count from the moment a request was due (no coordinated omission)."""
    outcome, rng = Outcome(), random.Random(seed)
    tasks: list[asyncio.Task[None]] = []
    started = due = time.perf_counter()
    for request in requests:
        due += rng.expovariate(rate)
        while (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(client.send(request, outcome, due)))
    await asyncio.gather(*tasks)
    outcome.wall_s = time.perf_counter() - started
    return outcome
