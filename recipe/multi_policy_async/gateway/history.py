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
"""Which earlier answer a request goes on from: messages in, and the prompt's ids with every sampled token as sampled.

An agent sends its whole history with every call. Rendering and encoding it again would give other ids than the engine
sampled (merges across token borders, spacing of tool arguments), and so a context the policy never saw. Instead:

1. Canonical messages (roles, contents, tool names and parsed arguments, no ids, no spacing) are hashed in a chain; an
   answer is found by the hash of the history up to and including it. Among equal answers the response or tool-call
   id that the client echoes decides, then the oldest received one that nothing extends yet.
2. The history is rendered with the raw sampled text in place of the answers. Only if the text so far (of the found
   call's prompt and answer) is a prefix of it does the call extend that answer: its prompt is the stored ids plus the
   ids of the rest. A template that rewrites the past (strips thinking, changes the system prompt, trims) fails this
   check at every such call, and a new row begins with the history as masked context.
3. A history whose last answer the client rewrote does not contain that answer: it is superseded, unless the client goes
   on from it later, or rewards it by its request id. Words that some call of the workflow said are no rewriting: they
   come from there.
"""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .call import Call, CallState
from .image_parts import ImageContent
from .openai_lowering import as_object, parse_arguments
from .request import Message
from .tokenizer import PolicyTokenizer, SampledText


@dataclass(slots=True)
class Prompt:
    """What a call is started from.

    Attributes:
        text: the rendered conversation, ``ids`` encode it.
        messages: as rendered, the raw sampled text in the place of answers that were found.
        digest: of the canonical messages.
        parent: the call whose prompt and answer ``ids`` begin with.
        supersedes: an answer that the client rewrote.
        continues: an answer that the client went on from, so it has it, though ``ids`` do not begin with it.
        images: of the messages, in the order of their placeholders.
    """

    ids: list[int]
    text: str
    messages: list[Message]
    digest: bytes
    parent: Call | None = None
    supersedes: Call | None = None
    continues: Call | None = None
    images: Sequence[ImageContent] = ()

    @property
    def earlier(self) -> tuple[Call, ...]:
        """The answers that the client went on from."""
        return tuple(call for call in (self.parent, self.continues) if call is not None)


class ConversationIndex:
    """The finished answers of one workflow, by the conversation they end."""

    def __init__(self) -> None:
        self._by_conversation: dict[bytes, list[Call]] = {}
        self._by_prompt: dict[bytes, list[Call]] = {}
        self._completions: dict[str, list[Call]] = {}
        self._said: set[bytes] = set()  # answers of all agents, without white space

    def add(self, call: Call) -> None:
        """A call is DONE: later requests may extend it."""
        answer = answer_of(call)
        self._said.add(_stripped(answer))
        if not call.prompt.messages:
            self._completions.setdefault(call.agent_id, []).append(call)
            return
        self._by_conversation.setdefault(_next(call.prompt.digest, answer), []).append(call)
        self._by_prompt.setdefault(call.prompt.digest, []).append(call)

    def find(
        self, digests: list[bytes], messages: list[Message], echoed: Container[str] = ()
    ) -> tuple[Call, int] | None:
        """The answer that ends the longest part of the history, and how many messages that part has.

        Args:
            echoed: request ids of answers that the client names.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] != "assistant":
                continue
            candidates = [c for c in self._by_conversation.get(digests[length], ()) if c.state in _ALIVE]
            if candidates:
                return _best(candidates, messages[length - 1], echoed), length
        return None

    def find_trimmed(self, digests: list[bytes], messages: list[Message], echoed: Container[str] = ()) -> Call | None:
        """The answer that the last assistant message of the history is but for white space; None if it is one."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None or self._by_conversation.get(digests[last + 1]):
            return None
        meant = _stripped(messages[last])
        answers = [c for c in self._by_prompt.get(digests[last], ()) if c.state in _ALIVE]
        answers = [c for c in answers if _stripped(answer_of(c)) == meant]
        return _best(answers, messages[last], echoed) if answers else None

    def find_completion(self, agent_id: str, ids: list[int]) -> Call | None:
        """The completion whose prompt and answer make up the longest beginning of a prompt of token ids."""
        found: Call | None = None
        for call in self._completions.get(agent_id, ()):
            length = len(call.prompt_ids) + len(call.ids)
            if call.state not in _ALIVE or length > len(ids) or not call.ids:
                continue
            if found is not None and length <= len(found.prompt_ids) + len(found.ids):
                continue
            if ids[: len(call.prompt_ids)] == call.prompt_ids and ids[len(call.prompt_ids) : length] == call.ids:
                found = call
        return found

    def find_completed_text(self, agent_id: str, text: str) -> Call | None:
        """The completion whose text and answer make up the longest beginning of a prompt of text."""
        candidates = [
            call
            for call in self._completions.get(agent_id, ())
            if call.state in _ALIVE and call.content and text.startswith(call.prompt.text + call.content)
        ]
        return max(candidates, key=lambda call: len(call.prompt.text) + len(call.content), default=None)

    def rewritten(self, digests: list[bytes], messages: list[Message]) -> Call | None:
        """The one answer that the last assistant message of the history stands in for without being it.

        None when there is no such answer, when it cannot be told which of several, when something extends it, when only
        white space differs (then the client still has it), or when another call, of any agent, said these words: then
        they are no rewriting.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None or self._by_conversation.get(digests[last + 1]):
            return None
        here = (call for call in self._by_prompt.get(digests[last], ()) if call.state in _ALIVE)
        answers = [call for call in here if call.extended_by is None and not call.rewritten]
        return answers[0] if len(answers) == 1 and _stripped(messages[last]) not in self._said else None


_ALIVE = (CallState.DONE, CallState.KEPT)


def conversation_digests(agent_id: str, messages: list[Message]) -> list[bytes]:
    """Digest of every prefix of a history: the k-th is of the first k messages."""
    digests = [hashlib.blake2b(agent_id.encode(), digest_size=16).digest()]
    for message in messages:
        digests.append(_next(digests[-1], message))
    return digests


def answer_of(call: Call) -> Message:
    """The assistant message that a client has when it got this answer."""
    message: Message = {"role": "assistant", "content": call.content}
    if call.tool_calls:
        message["tool_calls"] = [
            {"id": c.call_id, "function": {"name": c.name, "arguments": parse_arguments(c.arguments)}}
            for c in call.tool_calls
        ]
    return message


def extend(tokenizer: PolicyTokenizer, call: Call, text: str) -> list[int] | None:
    """Ids of ``text``, beginning with the call's own prompt and sampled ids; None where the text has other beginnings.

    The ids are joined at a control token only, where a tokenizer never merges.
    """
    so_far = call.prompt.text + tokenizer.decode(call.ids, skip_special_tokens=False)
    if not text.startswith(so_far) or not call.ids:
        return None
    rest = text[len(so_far) :]
    last = call.ids[-1]
    if tokenizer.is_special(last):
        # Encoded behind that token, as it stands in the text, and without it.
        rest_ids = tokenizer.encode(tokenizer.token_text(last) + rest)[1:]
    elif tokenizer.begins_special(rest):
        rest_ids = tokenizer.encode(rest)
    else:
        return None
    return [*call.prompt_ids, *call.ids, *rest_ids]


def raw_answer(tokenizer: PolicyTokenizer, call: Call) -> Message:
    """The answer as it was sampled, for the template: all text, without its end of turn."""
    ids = call.ids[:-1] if call.ids and call.ids[-1] in tokenizer.end_of_turn_ids else call.ids
    return {"role": "assistant", "content": SampledText(tokenizer.decode(ids, skip_special_tokens=False))}


def _canonical(message: Message) -> list[Any]:
    calls = [[c["function"]["name"], as_object(c["function"]["arguments"])] for c in message.get("tool_calls", ())]
    # Frameworks put the agent's name on what the model said, which knew nothing of it.
    name = None if message["role"] == "assistant" else message.get("name")
    return [message["role"], message["content"], calls, name]


def _next(digest: bytes, message: Message) -> bytes:
    data = orjson.dumps(_canonical(message), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(digest + data, digest_size=16).digest()


def _stripped(message: Message) -> bytes:
    return _next(b"", {**message, "content": "".join(message["content"].split())})


def _best(candidates: list[Call], message: Message, echoed: Container[str]) -> Call:
    tool_calls = {call.get("id") for call in message.get("tool_calls", ())}
    for candidate in candidates:
        if candidate.request_id in echoed or tool_calls & {call.call_id for call in candidate.tool_calls}:
            return candidate
    # An answer that was rewritten, or that nobody is known to have received, is meant only where no other can be.
    candidates = [c for c in candidates if not c.rewritten] or candidates
    candidates = [c for c in candidates if c.received] or candidates
    return next((c for c in candidates if c.extended_by is None), candidates[0])
