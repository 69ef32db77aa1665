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
"""Is a chat template append-only? ``python -m recipe.multi_policy_async.check_template --model FOLDER``.

A conversation can be one training row only where rendering a longer history begins with the text of the shorter one and
its sampled answer. Elsewhere nothing is lost: the gateway begins a new row with the history as masked context.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .gateway.errors import BadRequest
from .gateway.history import extend
from .gateway.request import Message
from .gateway.tokenizer import PolicyTokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":  2}}\n</tool_call>'


@dataclass(frozen=True)
class Scenario:
    """A conversation, an answer as it is sampled, and how it goes on."""

    name: str
    history: tuple[Message, ...]
    answer: str
    then: tuple[Message, ...]
    tools: bool = False
    truncated: bool = False
    hint: str = ""


_USER: Message = {"role": "user", "content": "One?"}
_NEXT: Message = {"role": "user", "content": "Two?"}
_STRIPS = "the template rewrites earlier answers; one row per turn, or a template that keeps them"

SCENARIOS = (
    Scenario("a second question", (_USER,), "The answer.", (_NEXT,), hint="one row per turn: gateway.rows=per_call"),
    Scenario(
        "with a system message",
        ({"role": "system", "content": "Be brief."}, _USER),
        "The answer.",
        (_NEXT,),
        hint="put the instructions into the first user message",
    ),
    Scenario("an answer with white space around it", (_USER,), "\n The answer. \n", (_NEXT,), hint=_STRIPS),
    Scenario("a truncated answer", (_USER,), "The ans", (_NEXT,), truncated=True, hint="raise max_response_length"),
    Scenario("an answer with thinking", (_USER,), "<think>\nHm.\n</think>\n\nThe answer.", (_NEXT,), hint=_STRIPS),
    Scenario(
        "a tool call and its result",
        (_USER,),
        _CALL,
        ({"role": "tool", "content": "3", "tool_call_id": "call_1"},),
        tools=True,
        hint="the template has no place for tool results, or moves the tools; one row per turn",
    ),
    Scenario(
        "thinking, a tool call and its result",
        (_USER,),
        "<think>\nHm.\n</think>\n\n" + _CALL,
        ({"role": "tool", "content": "3", "tool_call_id": "call_1"},),
        tools=True,
        hint=_STRIPS,
    ),
)


def check(tokenizer: PolicyTokenizer, scenario: Scenario, **template_kwargs: Any) -> str | None:
    """None when the template is append-only here, else what happens."""
    tools = [_TOOL] if scenario.tools else None
    try:
        prompt_text = tokenizer.render(list(scenario.history), tools, **template_kwargs)
        ids = tokenizer.encode(scenario.answer)
        if not scenario.truncated:
            ids = ids + [tokenizer.end_of_turn_ids[0]]
        answer: Message = {"role": "assistant", "content": scenario.answer}
        text = tokenizer.render([*scenario.history, answer, *scenario.then], tools, **template_kwargs)
    except BadRequest as error:
        return error.message
    call: Any = SimpleNamespace(
        prompt=SimpleNamespace(text=prompt_text), prompt_ids=tokenizer.encode(prompt_text), ids=ids
    )
    if extend(tokenizer, call, text) is not None:
        return None
    so_far = prompt_text + tokenizer.decode(ids, skip_special_tokens=False)
    same = next((i for i, (a, b) in enumerate(zip(so_far, text, strict=False)) if a != b), min(len(so_far), len(text)))
    before, sampled, rendered = so_far[max(0, same - 20) : same], so_far[same : same + 20], text[same : same + 20]
    return f"after {before!r} sampled {sampled!r}, template {rendered!r}"


def report(tokenizer: PolicyTokenizer, **template_kwargs: Any) -> Iterator[tuple[Scenario, str | None]]:
    """Every scenario with its finding."""
    for scenario in SCENARIOS:
        yield scenario, check(tokenizer, scenario, **template_kwargs)


def main(argv: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    """Print the findings; exit code 1 when the template is not append-only for a plain second question."""
    parser = argparse.ArgumentParser(prog="check_template", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--no-thinking", action="store_true", help="pass enable_thinking=false to the template")
    arguments = parser.parse_args(argv)
    try:
        tokenizer = PolicyTokenizer.load(arguments.model)
    except ValueError as error:
        show(str(error))
        return 2
    if not tokenizer.end_of_turn_ids:
        show(f"{arguments.model} names no eos token: the end of a turn cannot be told")
        return 2
    kwargs = {"enable_thinking": False} if arguments.no_thinking else {}
    findings = list(report(tokenizer, **kwargs))
    for scenario, finding in findings:
        show(f"{'append-only' if finding is None else 'NEW ROW':<12} {scenario.name}")
        if finding is not None:
            show(f"{'':<12} {finding}\n{'':<12} -> {scenario.hint}")
    plain = findings[0][1] is None
    show("multi-turn conversations can be one row" if plain else "every turn becomes a row of its own")
    return 0 if plain else 1


if __name__ == "__main__":
    sys.exit(main())
