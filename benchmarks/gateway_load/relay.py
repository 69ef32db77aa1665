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
"""A bare relay, the yardstick: what any gateway in Python costs on this machine that does nothing but pass requests on.

    python -m benchmarks.gateway_load.relay '{"routers": {MODEL: URL, ...}}'

FastAPI in front, aiohttp behind, as the gateway has them. It prints its URL as one JSON line and ends when its standard
input does.
"""

import json
import sys

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import Response

from recipe.multi_policy_async.gateway.collector import calm_collector
from recipe.multi_policy_async.gateway.http_server import HttpServer
from recipe.multi_policy_async.tests.fakes.child_process import run, until_parent_leaves


def create_app(routers: dict[str, str], http: aiohttp.ClientSession) -> FastAPI:
    app = FastAPI()

    @app.post("/{model}/generate")
    async def generate(model: str, request: Request) -> Response:
        headers = {"content-type": "application/json"}
        async with http.post(f"{routers[model]}/generate", data=await request.body(), headers=headers) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")

    return app


async def serve(routers: dict[str, str]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        server = HttpServer(create_app(routers, http), "127.0.0.1", 0, max_head_bytes=2**16, request_timeout_s=60)
        url = await server.start()
        calm_collector()
        print(json.dumps({"url": url}), flush=True)
        await until_parent_leaves()
        await server.stop()


if __name__ == "__main__":
    run(serve(json.loads(sys.argv[1])["routers"]))
