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

from .checks import array, boolean, fault, integer, mapping, optional, string
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
    n = optional(body, "n", lambda v, p: integer(v, p, 1, max_choices), 1)
    _refuse_unsupported(body, n)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * n > max_choices:
        raise fault("prompt", f"at most {max_choices} answers, prompts times n,", len(prompts) * n)
    return AgentRequest(
        messages=[],
        prompts=prompts,
        asked=lower_sampling(body),
        max_tokens=lower_max_tokens(body) or _DEFAULT_MAX_TOKENS,
        stop=lower_stops(body.get("stop")),
        n=n,
        stream=optional(body, "stream", boolean, False),
        include_usage=optional(optional(body, "stream_options", mapping, {}), "include_usage", boolean, False),
        logprobs=body.get("logprobs") is not None,
        top_logprobs=optional(body, "logprobs", lambda v, p: integer(v, p, 0, 5), 0),
        model=optional(body, "model", string),
    )


def _refuse_unsupported(body: dict[str, Any], n: int) -> None:
    if optional(body, "echo", boolean):
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
