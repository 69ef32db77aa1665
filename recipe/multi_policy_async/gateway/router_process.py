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
"""One router process per model: sglang-router (or its successor smg) as a dumb balancer over the model's replicas.

One process per model, since a shared one mixes models or needs a vocabulary download. The flags keep out of it what
the gateway does itself, and does knowing which faults are the client's: retries, circuit breaking, limits, timeouts.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class RouterDied(RuntimeError):
    """The router process ended by itself; the message holds the end of its log."""


class RouterProcess:
    """A child process that ends with its parent.

    Start it from a thread that lives as long as it should: Linux sends the death signal when the starting thread ends.

    Args:
        worker_urls: the model's rollout servers.
        program: ``sglang_router`` or ``smg``.
        log_path: gets the child's output.
        policy: the program's balancing policy.
        port: 0 for any free one.
    """

    def __init__(
        self,
        model_id: str,
        worker_urls: Sequence[str],
        program: str,
        log_path: str | Path,
        *,
        policy: str = "cache_aware",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if program not in _ARGUMENTS:
            raise ValueError(f"router must be one of {sorted(_ARGUMENTS)}, got {program!r}")
        if not worker_urls:
            raise ValueError(f"model {model_id}: a router needs at least one worker")
        self.model_id = model_id
        self._worker_urls = list(worker_urls)
        self._log_path = Path(log_path)
        self._program = program
        self._policy = policy
        self._host = host
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL, known after ``start``."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child; ``wait_ready`` tells when it serves."""
        if self._process is not None:
            raise RuntimeError(f"the router of {self.model_id} runs already")
        self._port = self._port or _free_port(self._host)
        arguments = _ARGUMENTS[self._program](
            self._host, self._port, _free_port(self._host), self._policy, self._worker_urls
        )
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log_path, "ab") as log:
            # Not preexec_fn, which may deadlock in a process with threads: the child arms its own death signal.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(os.getpid()), self._program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the job, which stops its children in its own order
            )

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Return when the router serves and knows all its workers.

        Raises:
            RouterDied: it ended.
            TimeoutError: not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=2, trust_env=False) as http:
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    response = await http.get("/workers")
                    workers = response.json().get("workers", []) if response.status_code == 200 else []
                    healthy = [worker for worker in workers if worker.get("is_healthy")]
                    if len(healthy) >= len(self._worker_urls):
                        return
                except (httpx.HTTPError, ValueError):
                    pass  # not listening yet
                await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"the router of {self.model_id} was not ready within {timeout_s:g} s{self._log_tail()}")

    def check_alive(self) -> None:
        """Raise RouterDied if the process ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RouterDied(f"the router of {self.model_id} ended with code {code}{self._log_tail()}")

    def stop(self, timeout_s: float = 5.0) -> None:
        """SIGTERM, which lets it drain, then SIGKILL."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("the router of %s did not stop within %g s and is killed", self.model_id, timeout_s)
                self._process.kill()
                self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()[-5:]
        except OSError:
            return ""
        return f"; the end of {self._log_path}:\n" + "\n".join(lines)


def _common_arguments(host: str, port: int, metrics_port: int, policy: str, workers: Sequence[str]) -> list[str]:
    return [
        *("--host", host, "--port", str(port), "--policy", policy),
        # A client's fault must not take a server out of service, and a failed call is retried by the gateway, which
        # first makes sure that the old attempt has ended.
        *("--disable-circuit-breaker", "--disable-retries"),
        # The default health path hangs while a server is paused for a weight sync.
        *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "2"),
        *("--request-timeout-secs", "86400", "--max-concurrent-requests", "-1"),
        *("--prometheus-host", host, "--prometheus-port", str(metrics_port)),
        *("--log-level", "warn", "--worker-startup-check-interval", "1"),
        # Whoever stops the router has stopped the requests; the defaults would wait for minutes.
        *("--shutdown-grace-period-secs", "1"),
        *("--worker-urls", *workers),
    ]


def _smg_arguments(*args: Any) -> list[str]:
    # Its load polls ask for paths that only SGLang's own servers have, and would leave busy servers out.
    return ["--disable-load-monitoring", "--disable-worker-overload-protection", *_common_arguments(*args)]


_ARGUMENTS = {"sglang_router": _common_arguments, "smg": _smg_arguments}


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


# What the child runs: arm the death signal, then become the router. Source text rather than a module, so that the child
# finds nothing of this package on its path and needs none of it.
_CHILD = f"""
import ctypes, importlib, os, sys
parent, program = int(sys.argv[1]), sys.argv[2]
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() != parent:
    sys.exit("the parent ended before the router began")
sys.argv = [program, *sys.argv[3:]]
importlib.import_module(program + ".launch_router").main()
"""
