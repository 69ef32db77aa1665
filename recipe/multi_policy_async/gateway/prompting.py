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
"""A request's messages -> the prompt that is sent, going on from an earlier answer where the history allows it."""

import functools
from typing import Any

from .budget import check_possible
from .errors import BadRequest
from .generation import ServedModel
from .history import Prompt, conversation_digests, extend, raw_answer
from .images import extend_with_images, has_images, place_images, take_images
from .off_loop import LONG_BODY, LONG_TEXT, off_loop
from .request import AgentRequest, Message
from .session import WorkflowSession
from .tokenizer import PolicyTokenizer


async def build_prompt(session: WorkflowSession, model: ServedModel, agent_id: str, request: AgentRequest) -> Prompt:
    """Render and encode a request.

    Raises:
        BadRequest: the chat template refuses the messages, or an image is not usable.
    """
    tokenizer, long = model.tokenizer, request.body_bytes > LONG_BODY
    images = await take_images(model, request.messages) if has_images(request.messages) else ()
    kwargs = {**model.binding.chat_template_kwargs, **request.template_kwargs}
    digests = await off_loop(long, conversation_digests, agent_id, request.messages)
    rewritten = session.conversations.rewritten(digests, request.messages)
    trimmed = session.conversations.find_trimmed(digests, request.messages, request.echoed)
    parent, length = session.conversations.find(digests, request.messages, request.echoed) or (None, 0)
    if parent is not None:
        messages = [*parent.prompt.messages, raw_answer(tokenizer, parent), *request.messages[length:]]
        try:
            text = await _render(tokenizer, messages, request, kwargs)
            ids = None if parent.cut else await off_loop(len(text) > LONG_TEXT, extend, tokenizer, parent, text)
        except BadRequest:
            ids = None  # such as a template that takes no tool result behind an answer whose calls stand in its text
        if ids is not None and images:
            ids = extend_with_images(model, parent, ids, images)
        if ids is not None:
            return Prompt(ids, text, messages, digests[-1], parent, rewritten, trimmed, images)
    text = await _render(tokenizer, request.messages, request, kwargs)
    ids = await _encode(tokenizer, text)
    if images:
        ids = place_images(model, ids, images)
    return Prompt(ids, text, request.messages, digests[-1], None, rewritten, trimmed or parent, images)


async def build_completion_prompts(
    session: WorkflowSession, model: ServedModel, agent_id: str, request: AgentRequest
) -> list[Prompt]:
    """The prompts of a completion: texts are encoded as they stand, special tokens included; ids are taken as they are.

    Raises:
        BadRequest: a prompt is empty, too long, or holds an id that is none of this model's.
    """
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            check_possible(model.binding, len(prompt))
    return [await _completion_prompt(session, model.tokenizer, agent_id, prompt) for prompt in request.prompts]


async def _completion_prompt(
    session: WorkflowSession, tokenizer: PolicyTokenizer, agent_id: str, prompt: str | list[int]
) -> Prompt:
    parent = continues = None
    if isinstance(prompt, str):
        ids = await _encode(tokenizer, prompt)
        text = prompt
        continues = session.conversations.find_completed_text(agent_id, text)
    else:
        ids = prompt
        if any(token_id >= tokenizer.vocab_size for token_id in ids):
            raise BadRequest(f"prompt: the token ids of this model are below {tokenizer.vocab_size}", param="prompt")
        decode = functools.partial(tokenizer.decode, ids, skip_special_tokens=False)
        text = await off_loop(len(ids) > LONG_TEXT, decode)
        parent = session.conversations.find_completion(agent_id, ids)
    if not ids:
        raise BadRequest("prompt is empty", param="prompt")
    if tokenizer.images is not None and tokenizer.images.reserved(ids):
        raise BadRequest("prompt: an image placeholder stands for no image here", param="prompt")
    return Prompt(ids, text, [], b"", parent, None, continues)


async def _render(
    tokenizer: PolicyTokenizer, messages: list[Message], request: AgentRequest, kwargs: dict[str, Any]
) -> str:
    render = functools.partial(tokenizer.render, messages, request.tools, **kwargs)
    return await off_loop(request.body_bytes > LONG_BODY, render)


async def _encode(tokenizer: PolicyTokenizer, text: str) -> list[int]:
    return await off_loop(len(text) > LONG_TEXT, tokenizer.encode, text)
