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
"""A gateway with scripted engines in a thread of its own, for tests that call it synchronously."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import httpx

from .fake_engine import FakeEngine
from .gateway_world import Texts, World, gateway_world

SAYS = {"planner_model": "plan", "solver_model": "42"}


class GatewayThread:
    """Two policies and, always open, a witness workflow that nobody disturbs.

    Attributes:
        calls: how often each agent of the witness was asked.
    """

    def __init__(self, folder: Path, **spec):
        self.texts = Texts(folder)
        self.calls = {"planner": 0, "solver": 0}
        self._folder, self._spec = folder, spec
        self._number = 0
        self._started: Future[World] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        engines = {model_id: FakeEngine(self.texts.says(text)) for model_id, text in SAYS.items()}
        try:
            async with gateway_world(self._folder, engines, **self._spec) as world:
                self._started.set_result(world)
                await self._stopping.wait()
        except Exception as error:  # for the thread that waits in start(), which would learn nothing
            if not self._started.done():
                self._started.set_exception(error)
            raise

    def start(self) -> None:
        self._thread.start()
        self.world = self._started.result(30)
        self.http = httpx.Client(verify=False, timeout=10)
        self.key = {"authorization": f"Bearer {self.world.router.control_key}"}
        self.witness = self.run(self.world.open("witness"))
        self.subject = self._open()

    def stop(self) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _open(self):
        self._number += 1
        self.subject_id = f"subject-{self._number}"
        return self.run(self.world.open(self.subject_id))

    def open_subject(self):
        """Endpoints of a workflow that is open and not paused: a new one, if the last one is not any more."""
        found = self.world.gateway.sessions.find(self.subject_id)
        if not hasattr(found, "status") or found.status()["state"] != "open":
            self._open_next()
        return self.subject

    def _open_next(self) -> None:
        self.subject = self._open()

    def ask(self, endpoint, messages=({"role": "user", "content": "hello"},), **more) -> httpx.Response:
        return self.http.post(f"{endpoint.openai_base_url}/chat/completions", json={"messages": [*messages], **more})

    def check_witness(self) -> None:
        """Both policies answer as ever, and the gateway knows of no bug."""
        for agent, endpoint in self.witness.items():
            if agent not in self.calls:
                continue
            answer = self.ask(endpoint)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == SAYS[endpoint.model_id]
            self.calls[agent] += 1
        assert self.world.metric("errors_total", code="internal") == 0

    def finalize_witness(self):
        """Its rows: every call of either policy, nothing else."""
        self.run(self.world.control.finalize("witness", rewards=1.0))
        return [record for record in self.world.sink.records if record.workflow_id == "witness"][0].trajectories


@contextmanager
def gateway_thread(folder: Path, **spec):
    thread = GatewayThread(folder, **spec)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()
