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
"""What the gateway asks of a model's servers: token ids in; ids, log-probs and the version that sampled them out."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..trajectory import Version
from .image_parts import ImageContent


@dataclass(slots=True)
class Attempt:
    """One request to a model's servers; a call may need several."""

    rid: str  # "<call>#<k>", unique over the job
    input_ids: list[int]
    sampling_params: dict[str, Any]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stream: bool  # False: one chunk at the end is enough, which is cheaper
    top_logprobs: int = 0
    routing_key: str = ""  # the conversation, for balancers that keep one on one replica
    images: Sequence[ImageContent] = ()  # one per placeholder in ``input_ids``
    prompt_tokens: int = 0  # with images: how many tokens ``input_ids`` are once the server has put them in


@dataclass(slots=True)
class TokenChunk:
    """Tokens sampled since the last chunk.

    Attributes:
        finish: None while the attempt runs; then ``stop``, ``length`` or ``abort``.
        versions: one per token.
        top_logprobs: per token, the alternatives [(log-prob, id)], when asked for.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[Version]
    finish: str | None = None
    cached_tokens: int = 0
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)


class UpstreamError(Exception):
    """The servers failed this attempt; another one may succeed."""


_NUMBERS = {float, int, type(None)}  # None: a log-prob that is not finite; such a row is dropped as ``non_finite``
_TOO_LARGE = 2**31  # rows hold ids and versions in 32 bits
ERROR_TEXT_LIMIT = 500


def check_chunk(chunk: TokenChunk) -> None:
    """Refuse what no row can hold: it would fail when the workflow is finalized, and with it all its other rows.

    Raises:
        UpstreamError: naming what is wrong.
    """
    alternatives = [entry for entries in chunk.top_logprobs for entry in entries]
    ids = chunk.ids + [token for _, token in alternatives]
    log_probs = chunk.log_probs + [log_prob for log_prob, _ in alternatives]
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= _TOO_LARGE):
        raise UpstreamError(f"ids that are none: {ids!r}"[:ERROR_TEXT_LIMIT])
    if not set(map(type, log_probs)) <= _NUMBERS:
        raise UpstreamError(f"log-probs that are none: {log_probs!r}"[:ERROR_TEXT_LIMIT])
    for version in set(chunk.versions):
        if min(version) < 0 or max(version) >= _TOO_LARGE:
            raise UpstreamError(f"a version that is none: {version}"[:ERROR_TEXT_LIMIT])


class UpstreamRefused(Exception):
    """The servers refuse this request as the client's fault (4xx); another attempt would be refused too."""


class Upstream(Protocol):
    """The servers of one model. Both implementations give the same trajectories."""

    def generate(self, attempt: Attempt) -> AsyncIterator[TokenChunk]:
        """Run one attempt; the last chunk has ``finish`` set.

        Raises:
            UpstreamError: connection refused or lost, 5xx, or an answer that makes no sense.
            UpstreamRefused: 4xx.
        """

    async def abort(self, rid: str) -> None:
        """End an attempt at every replica of the model; returns when all have answered or are known to be gone."""

    async def waiting_requests(self) -> int | None:
        """Requests that wait in the servers for a place in a batch, of all replicas; None: they do not tell."""

    async def close(self) -> None:
        """Release connections."""
