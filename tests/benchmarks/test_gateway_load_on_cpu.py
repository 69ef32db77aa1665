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
"""The program that loads the gateway, as far as a fault of its own would be taken for one of the gateway."""

import asyncio

from benchmarks.gateway_load.load import Client, Outcome, post

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def test_a_connection_that_the_server_closed_while_idle_is_not_used_again():
    """Whoever writes to it waits for ever: with the standard loop this looked as if the router lost requests."""
    connections = []

    async def answer_once(reader, writer):
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        client, outcome = Client(), Outcome()
        request = post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", ())
        await client.send(request, outcome)
        await asyncio.sleep(0.05)
        await asyncio.wait_for(client.send(request, outcome), 5)
        client.close()
        server.close()
        return outcome

    outcome = asyncio.run(run())
    assert outcome.not_2xx == 0 and len(connections) == 2
