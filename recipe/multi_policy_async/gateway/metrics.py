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
"""Prometheus metrics of the gateway. One registry per gateway, so that several can live in one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """Counters by model; label values come from the job's config and closed lists only, never from clients."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gateway_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"gateway_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"gateway_{name}", text, labels, buckets=_SECONDS, registry=self.registry)

        self._requests = counter("requests", "Agent requests by outcome", "model", "status")
        self._errors = counter("errors", "Errors answered to agents", "code")
        self._calls = counter("calls", "Finished calls: kept or abandoned, by reason", "model", "outcome")
        self._tokens = counter("sampled_tokens", "Sampled tokens of finished calls, by outcome", "model", "outcome")
        self._seconds = histogram("call_seconds", "From request to last token", "model")
        self._held = histogram("hold_seconds", "Waits at a closed gate", "model")
        self._slot_waits = histogram("slot_wait_seconds", "Waits for one of the calls in flight to end", "model")
        self._limit = gauge("in_flight_limit", "Calls that may be at the model's servers at once", "model")
        self._drained = histogram("drain_seconds", "From the gate's closing to the last running attempt's end", "model")
        self._paused = histogram("pause_seconds", "From the gate's closing to its opening", "model")
        self._at_pause = gauge("in_flight_at_pause", "Attempts running when the gate last closed", "model")
        self._resumes = counter("resumes", "Calls resumed with their partial output after an abort", "model")
        self._restarts = counter("restarts", "Attempts started again from the prompt, by reason", "model", "reason")
        self._joins = counter("retries_joined", "Marked retries that joined their first attempt's call", "model")
        self._overridden = counter("sampling_overridden", "Sampling values of clients not used", "model", "name")
        self._workflows = gauge("workflows", "Workflows by state", "state")
        self._workflows_closed = counter("workflows_closed", "Closed workflows by status", "status")
        self._workflows_reaped = counter("workflows_reaped", "Workflows aborted because nobody used them any more")

    def request(self, model_id: str, status: int) -> None:
        self._requests.labels(model_id, str(status)).inc()

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def call_ended(self, model_id: str, outcome: str, tokens: int) -> None:
        self._calls.labels(model_id, outcome).inc()
        self._tokens.labels(model_id, outcome).inc(tokens)

    def tokens_lost(self, model_id: str, tokens: int) -> None:
        """Tokens of an attempt that was started again."""
        self._tokens.labels(model_id, "superseded").inc(tokens)

    def call_seconds(self, model_id: str, seconds: float) -> None:
        self._seconds.labels(model_id).observe(seconds)

    def held(self, model_id: str, seconds: float) -> None:
        self._held.labels(model_id).observe(seconds)

    def slot_wait(self, model_id: str, seconds: float) -> None:
        self._slot_waits.labels(model_id).observe(seconds)

    def in_flight_limit(self, model_id: str, limit: int) -> None:
        self._limit.labels(model_id).set(limit)

    def drained(self, model_id: str, seconds: float) -> None:
        self._drained.labels(model_id).observe(seconds)

    def paused_seconds(self, model_id: str, seconds: float) -> None:
        self._paused.labels(model_id).observe(seconds)

    def in_flight_at_pause(self, model_id: str, running: int) -> None:
        self._at_pause.labels(model_id).set(running)

    def resumed(self, model_id: str) -> None:
        self._resumes.labels(model_id).inc()

    def restarted(self, model_id: str, reason: str) -> None:
        self._restarts.labels(model_id, reason).inc()

    def joined(self, model_id: str) -> None:
        self._joins.labels(model_id).inc()

    def sampling_overridden(self, model_id: str, name: str) -> None:
        self._overridden.labels(model_id, name).inc()

    def workflows(self, *, open_now: int, closed: int) -> None:
        self._workflows.labels("open").set(open_now)
        self._workflows.labels("closed").set(closed)

    def workflow_closed(self, status: str) -> None:
        self._workflows_closed.labels(status).inc()

    def workflow_reaped(self) -> None:
        self._workflows_reaped.inc()

    def exposition(self) -> bytes:
        """The text format of prometheus."""
        return generate_latest(self.registry)
