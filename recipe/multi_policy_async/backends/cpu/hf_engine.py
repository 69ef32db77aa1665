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
"""Continuous batching over a transformers model on the CPU.

One thread runs the model. Requests join and leave the running batch between two tokens::

    submit ──> waiting ──(admit: prefill all but the last prompt token)──> rows ──(one token each)──> finished
                  ^ held while paused                                       └──(stop, length, abort)──^

The last prompt token of a new row is the first input of its decode steps, so every step treats all rows alike.
"""

import logging
import random
import threading
from collections import deque
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from ...trajectory import Version
from .generation_request import GenerationRequest, QueueFull
from .grammar import Grammars
from .running_batch import Row, RunningBatch
from .sampling import InvalidRequest
from .weights import WeightStore

logger = logging.getLogger(__name__)


class HFEngine:
    """Generates for many requests at once.

    Weights and version change only while no row runs (abort, load, stamp, resume), so all tokens of one attempt share
    one version and the cache never mixes weights. The engine starts paused, and stays so until a version is set.

    Args:
        model: a causal language model with full attention in every layer, on the CPU.
        max_model_len: prompt and output tokens of one request.
        max_batch_size: rows that run at once; further requests wait.
        max_waiting: requests that wait; further ones are refused.
        eos_token_ids: end a row unless it ignores them.
        seed: of the sampling of requests that bring no seed.
        model_path: with the tokenizer that requests with a JSON schema need; None: those are refused.

    Raises:
        ValueError: the model has sliding-window or recurrent layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        max_batch_size: int,
        max_waiting: int = 4096,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        model_path: str | None = None,
    ):
        config = model.config.get_text_config()
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if other:
            raise ValueError(f"the CPU rollout server serves models with full attention only, not {sorted(other)}")
        self.max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.max_waiting = max_waiting
        eos_token_ids = tuple(eos_token_ids)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.weights = WeightStore(model)
        self._vocabulary = config.vocab_size
        self._random = random.Random(seed)
        self._grammars = Grammars(model_path, eos_token_ids, config.vocab_size) if model_path else None
        self._changed = threading.Condition()  # guards everything below but the batch, which the engine's thread owns
        self._live: dict[str, GenerationRequest] = {}
        self._waiting: deque[GenerationRequest] = deque()
        self._paused = True
        self._version: Version | None = None
        self._stamped = False  # the version names the weights in force
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._batch = RunningBatch(model)

    # -- from any thread -------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        return self._version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def num_running(self) -> int:
        return len(self._batch.rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it waits while the engine is paused.

        Raises:
            InvalidRequest: empty or over-long prompt, a token outside the vocabulary, a JSON schema that cannot be
                followed, or the rid is already in use.
            QueueFull: ``max_waiting`` requests wait already.
        """
        total = len(request.prompt_ids) + request.params.max_new_tokens
        if not request.prompt_ids:
            raise InvalidRequest("input_ids is empty")
        if len(request.prompt_ids) >= self.max_model_len or total > self.max_model_len:
            raise InvalidRequest(
                f"{len(request.prompt_ids)} input tokens and max_new_tokens={request.params.max_new_tokens} exceed the "
                f"model's maximum context length of {self.max_model_len} tokens"
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._vocabulary:
            raise InvalidRequest(f"input_ids holds a token outside the vocabulary of {self._vocabulary}")
        if request.params.json_schema:
            if self._grammars is None:
                raise InvalidRequest("json_schema is not supported: this server was started without a tokenizer")
            request.matcher = self._grammars.matcher(request.params.json_schema)
        if request.params.max_new_tokens == 0:
            request.version = self._version
            request.finish_reason = {"type": "length", "length": 0}
            request.on_finish(request)
            return
        with self._changed:
            if self._stopping:
                raise RuntimeError("the engine is stopping")
            if request.rid in self._live:
                raise InvalidRequest(f"duplicate request id {request.rid!r}")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait already")
            self._live[request.rid] = request
            self._waiting.append(request)
            self._changed.notify_all()

    def abort(self, rid: str) -> bool:
        """Finish a request with what it has; false when there is none under this rid."""
        with self._changed:
            request = self._live.get(rid)
            if request is None:
                return False
            request.abort_wanted = True
            self._changed.notify_all()
            return True

    def abort_all(self) -> None:
        """Finish all running and waiting requests with what they have."""
        with self._changed:
            for request in self._live.values():
                request.abort_wanted = True
            self._changed.notify_all()

    def pause(self, timeout_s: float = 60.0) -> None:
        """Abort everything, admit nothing more, and return when no row runs.

        Raises:
            TimeoutError: rows were still running after ``timeout_s``.
        """
        with self._changed:
            self._paused = True
            aborted = list(self._live.values())
            for request in aborted:
                request.abort_wanted = True
            self._changed.notify_all()
            if self._thread is None:
                return  # stepped by hand
            done = self._changed.wait_for(lambda: not any(self._live.get(r.rid) is r for r in aborted), timeout_s)
        if not done:
            raise TimeoutError(f"the engine did not stop its rows within {timeout_s} s")

    def resume(self) -> bool:
        """Admit requests again; false, and still paused, while the weights have no version."""
        with self._changed:
            if not self._stamped:
                return False
            self._paused = False
            self._changed.notify_all()
            return True

    def begin_load(self) -> None:
        """Announce new weights: until ``set_version`` the engine cannot resume.

        Raises:
            RuntimeError: the engine is not paused.
        """
        with self._changed:
            self._require_idle("load weights")
            self._stamped = False
            self._batch.release()
            self.weights.begin_load()

    def set_version(self, version: Version) -> None:
        """Stamp the weights in force.

        Raises:
            RuntimeError: rows run under another version, or a load stopped half way.
        """
        with self._changed:
            if self._stamped and version == self._version:
                return
            self._require_idle("change the weight version")
            if not self.weights.complete:
                raise RuntimeError("the last weight load did not finish, its weights get no version")
            self._version = version
            self._stamped = True

    def _require_idle(self, what: str) -> None:
        if not self._paused or self._batch.rows:
            raise RuntimeError(f"cannot {what} while requests run: abort and pause first")

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def start(self, torch_threads: int) -> None:
        """Run the engine in its own thread."""
        assert self._thread is None, "started once"
        self._thread = threading.Thread(target=self._run, args=(torch_threads,), name="hf-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Abort everything and end the thread."""
        with self._changed:
            self._stopping = True
            for request in self._live.values():
                request.abort_wanted = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, torch_threads: int) -> None:
        torch.set_num_threads(torch_threads)  # per thread
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._stopping and not self._live:
                    return
            self.step()

    def _has_work(self) -> bool:
        if self._batch.rows or self._stopping or any(r.abort_wanted for r in self._waiting):
            return True
        return bool(self._waiting) and not self._paused

    @torch.inference_mode()
    def step(self) -> None:
        """Take aborts and new requests, then sample one token for every row; an error fails the rows, no more."""
        try:
            with self._changed:
                finished = self._take_aborts()
                admitted = self._admit()
            self._finish(finished)
            self._batch.add(admitted)
            self._finish(self._batch.decode())
        except Exception as error:  # the engine serves other requests after a bad one
            logger.exception("generation failed for %d rows", self.num_running)
            failed = self._batch.clear()
            for request in failed:
                request.error = f"{type(error).__name__}: {error}"
                request.finish_reason = {"type": "abort", "message": request.error}
            self._finish(failed)

    def _take_aborts(self) -> list[GenerationRequest]:
        aborted = [r for r in self._waiting if r.abort_wanted]
        if aborted:
            self._waiting = deque(r for r in self._waiting if not r.abort_wanted)
        aborted += self._batch.take_aborted()
        for request in aborted:
            request.finish_reason = {"type": "abort", "message": "aborted"}
        return aborted

    def _admit(self) -> list[Row]:
        admitted = []
        while self._waiting and not self._paused and self.num_running + len(admitted) < self.max_batch_size:
            request = self._waiting.popleft()
            request.version = self._version
            params = request.params
            stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.eos_token_ids
            generator = self._random if params.seed is None else random.Random(params.seed)
            admitted.append(Row(request, stop_ids, generator, 0, request.prompt_ids[-1]))
        return admitted

    def _finish(self, requests: list[GenerationRequest]) -> None:
        if not requests:
            return
        try:
            for request in requests:
                request.on_finish(request)
        finally:
            with self._changed:
                for request in requests:
                    del self._live[request.rid]
                self._changed.notify_all()
