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
"""OpenAI completions body -> AgentRequest."""

from typing import Any

from .checks import array, boolean, fault, integer, mapping, string
from .errors import BadRequest, UnsupportedValue
from .openai_lowering import lower_max_tokens, lower_sampling, lower_stops
from .request import AgentRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_LARGEST_ID = 2**31 - 1


def lower_completion(body: dict[str, Any], *, max_choices: int) -> AgentRequest:
    """Check and lower a body.

    Raises:
        BadRequest: naming the field at fault.
    """
    n = 1 if body.get("n") is None else integer(body["n"], "n", 1, max_choices)
    _refuse_unsupported(body, n)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * n > max_choices:
        raise fault("prompt", f"at most {max_choices} answers, prompts times n,", len(prompts) * n)
    options = {} if body.get("stream_options") is None else mapping(body["stream_options"], "stream_options")
    usage = options.get("include_usage")
    logprobs = body.get("logprobs")
    return AgentRequest(
        messages=[],
        prompts=prompts,
        asked=lower_sampling(body),
        max_tokens=lower_max_tokens(body) or _DEFAULT_MAX_TOKENS,
        stop=lower_stops(body.get("stop")),
        n=n,
        stream=False if body.get("stream") is None else boolean(body["stream"], "stream"),
        include_usage=False if usage is None else boolean(usage, "stream_options.include_usage"),
        logprobs=logprobs is not None,
        top_logprobs=0 if logprobs is None else integer(logprobs, "logprobs", 0, 5),
        model=None if body.get("model") is None else string(body["model"], "model"),
    )


def _refuse_unsupported(body: dict[str, Any], n: int) -> None:
    if body.get("echo") is not None and boolean(body["echo"], "echo"):
        raise UnsupportedValue("echo is not supported: the log-probs of a prompt are not computed", param="echo")
    if body.get("suffix"):
        raise UnsupportedValue("suffix is not supported", param="suffix")
    if body.get("best_of") not in (None, n):
        raise UnsupportedValue("best_of is not supported: every answer that is sampled is returned", param="best_of")


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One text, texts, one list of token ids, or lists of them."""
    if isinstance(prompt, str):
        return [prompt]
    entries = array(prompt, "prompt")
    if not entries:
        raise BadRequest("prompt is empty", param="prompt")
    if isinstance(entries[0], int):
        return [_ids(entries, "prompt")]
    return [
        entry if isinstance(entry, str) else _ids(array(entry, f"prompt[{index}]"), f"prompt[{index}]")
        for index, entry in enumerate(entries)
    ]


def _ids(entries: list[Any], where: str) -> list[int]:
    for index, entry in enumerate(entries):
        if type(entry) is not int or not 0 <= entry <= _LARGEST_ID:
            integer(entry, f"{where}[{index}]", 0, _LARGEST_ID)  # a name for each of millions would take a second
    return entries
