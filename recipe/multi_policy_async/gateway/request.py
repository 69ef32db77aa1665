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
"""The one internal form of an agent's request, whatever protocol it came in."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[
    str, Any
]  # role, content (str, or parts with images), tool_calls [{id, type, function: {name, arguments}}], tool_call_id, name


@dataclass(frozen=True)
class Constraint:
    """What an answer must match.

    Attributes:
        schema: JSON schema, as text.
        param: the request field that asks for it.
        is_call: the answer is a call: an object with ``name`` and ``arguments``.
    """

    schema: str
    param: str
    is_call: bool = False


@dataclass(slots=True)
class AgentRequest:
    """Lowered from OpenAI's or Anthropic's body by that protocol's adapter; everything here is checked.

    Attributes:
        messages: as chat templates expect them; content is text, or text and image parts (image_parts.py) where there
            are images; tool-call arguments are objects where they parse.
        prompts: of a completion, instead of messages: each a text or token ids, each sampled ``n`` times.
        tools: OpenAI function schemas, None when no tool may be called.
        asked: the client's sampling values by our names, only those it sent.
        max_tokens: the client's budget, None when it left it open.
        body_bytes: size of the body, which says what the request costs to handle.
        own_messages: messages at the beginning that the next response does not carry over: instructions.
        echoed: request ids of earlier answers that the client names, where a protocol has such names.
        told: parameters that the answer repeats, where a protocol does that.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool = True
    asked: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    model: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompts: list[str | list[int]] | None = None
    constraint: Constraint | None = None
    own_messages: int = 0
    echoed: frozenset[str] = frozenset()
    told: dict[str, Any] = field(default_factory=dict)
    body_bytes: int = 0
