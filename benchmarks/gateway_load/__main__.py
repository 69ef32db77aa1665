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
"""What the gateway costs: the real gateway and the real router before an engine of fixed latency, all on loopback.

    python -m benchmarks.gateway_load [--router smg] [--processes 2] [--json FILE]

Everything that listens is a process of its own: the engine (a fake, ``engine.py``, one port per model), one router per
model, a bare relay (``relay.py``), the gateway. In one run of about seven minutes:

1. 2,000 workflows are opened and stay open: each that ends is replaced. 10,000 requests go through them; memory is
   sampled meanwhile.
2. The router alone, the relay before it and the gateway before it take turns, at 1, 16 and 64 requests at once, three
   rounds.
3. The same with Poisson arrivals at half the rate that the gateway reached at 64.
4. All workflows are finalized, and every row is compared with what the engine sampled for it, id by id.

Exit code 1 when an answer, a row or a target is missed.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipe.multi_policy_async.gateway.client import GatewayControlClient
from recipe.multi_policy_async.gateway.router_process import RouterProcess
from recipe.multi_policy_async.tests.fakes.child_process import Child, run

from .meter import Meter
from .phases import Bench, check_rows, compare, compare_open, settle, soak
from .report import comparison_line, report, soak_line, summarize, verdicts
from .traffic import AGENTS, MODELS, Traffic

KEY = "load"
LATENCY_S = 0.02
GATEWAY = "recipe.multi_policy_async.tests.fakes.gateway_process"  # the real one, without Ray
CONCURRENCIES = {1: 250, 16: 2000, 64: 4000}  # requests per phase


async def measure(options: argparse.Namespace, folder: Path, children: contextlib.ExitStack) -> dict[str, Any]:
    """Start everything, run the phases, stop the gateways, read their rows."""
    traffic = Traffic(folder / "model")
    engine = _start(children, f"{__package__}.engine", traffic.engine_config(LATENCY_S))
    routers = {model: RouterProcess(model, [engine.hello[model]], options.router, folder / model) for model in MODELS}
    for router in routers.values():
        children.callback(router.stop)
        router.start()
        await router.wait_ready()
    router_urls = {model: router.url for model, router in routers.items()}
    records = [folder / f"records-{number}" for number in range(options.processes)]
    bindings = {
        model: traffic.binding(router_url=router_urls[model], replica_urls=[engine.hello[model]]) for model in MODELS
    }
    shared = {"agents": AGENTS, "bindings": bindings, "control_key": KEY, "flush": False}
    gateways = [_start(children, GATEWAY, shared | {"records": str(file)}) for file in records]
    relay = _start(children, f"{__package__}.relay", {"routers": router_urls})
    pids = {
        "gateway": [gateway.pid for gateway in gateways],
        "relay": [relay.pid],
        "router": [router.pid for router in routers.values()],
        "engine": [engine.pid],
        "client": [os.getpid()],
    }
    setting = {
        "router": f"{options.router} {importlib.metadata.version(options.router.replace('_', '-'))}",
        "gateway processes": options.processes,
        "event loop": type(asyncio.get_running_loop()).__module__.split(".")[0],
        "cores": os.cpu_count(),
        "load average before": os.getloadavg()[0],
    }
    control = GatewayControlClient([gateway.hello["url"] for gateway in gateways], KEY)
    direct = {"router": router_urls, "relay": {model: f"{relay.hello['url']}/{model}" for model in MODELS}}
    bench = Bench(traffic, engine.hello, direct, control, Meter(pids))

    soaked, still_open = await soak(bench, options.workflows, options.requests)
    _note(soak_line(soaked))
    closed, phases = {}, []
    for concurrency, count in CONCURRENCIES.items():
        await settle()
        found = await compare(bench, concurrency, int(count * options.scale), options.rounds)
        closed[concurrency] = summarize(found)
        _note(comparison_line(f"{concurrency} at once", closed[concurrency]))
        phases += found
    rate = closed[max(CONCURRENCIES)]["gateway_rate"] / 2
    await settle()
    found = await compare_open(bench, rate, options.seconds * options.scale, options.rounds)
    phases += found
    for workflow in still_open:
        await bench.finalize(workflow)
    counts = await bench.engine_counts()
    bench.client.close()
    await control.close()
    for gateway in gateways:
        gateway.stop()
    return {
        "setting": setting | {"load average after": os.getloadavg()[0]},
        "requests": bench.sent,
        "soak": soaked,
        "closed_loop": closed,
        "open_loop": summarize(found) | {"asked_rate": rate},
        "engines": counts,
        "rows": check_rows(bench, records),
        "phases": phases,
    }


def _note(line: str) -> None:
    """What is known already, for whoever watches."""
    print(line, file=sys.stderr, flush=True)


def _start(children: contextlib.ExitStack, module: str, config: dict[str, Any]) -> Child:
    child = Child(module, config)
    children.callback(child.stop)
    return child


def main() -> int:
    parser = argparse.ArgumentParser(prog="gateway_load", description=__doc__.split("\n")[0])
    parser.add_argument("--router", choices=("sglang_router", "smg"), default="sglang_router")
    parser.add_argument("--processes", type=int, default=1, help="gateway processes")
    parser.add_argument("--workflows", type=int, default=2000, help="open at any time")
    parser.add_argument("--requests", type=int, default=10000, help="through these workflows")
    parser.add_argument("--rounds", type=int, default=3, help="of every comparison")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one open-loop phase")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the comparisons; below 1 for a quick look")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as children:
        result = run(measure(options, Path(folder), children))
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if all(met for met, _ in verdicts(result).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
