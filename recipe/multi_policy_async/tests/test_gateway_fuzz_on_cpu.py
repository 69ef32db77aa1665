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
"""Whatever clients and models say: no 5xx, no hang, the session stays usable, the other policy notices nothing.

Invariant 9. A few cases in the unit suite; thousands, and those of the OpenAPI document, with
``FUZZ_EXAMPLES=500 python -m pytest -m fuzz recipe/multi_policy_async/tests`` (examples of each operation and of each
protocol). Fakes: the engines.
"""

import json
import os

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fakes.gateway_thread import SAYS, GatewayThread, gateway_thread
from .fakes.tiny_model_folder import make_model_folder

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
MANY = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LIMITS = {"hold_timeout_s": 0.05, "finalize_grace_s": 0.1, "retry_grace_s": 0.05, "constrained": "exclude"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    with gateway_thread(folder, **LIMITS) as thread:
        yield thread
        thread.check_witness()
        rows = thread.finalize_witness()
        for agent, calls in thread.calls.items():
            said = thread.texts.ids(SAYS[f"{agent}_model"])
            assert [row.response_ids.tolist() for row in rows if row.agent_id == agent] == [said] * calls


def check(answer: httpx.Response, what: object) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text, what)
    if answer.status_code >= 400:
        error = orjson.loads(answer.content)["error"]
        assert error["message"] and error["type"], what


def operations(gateway: GatewayThread):
    openapi = pytest.importorskip("schemathesis").openapi
    schema = openapi.from_dict(gateway.http.get(f"{gateway.world.base_url}/openapi.json").json())
    return [operation.ok() for operation in schema.get_all_operations()]


@pytest.mark.skipif("FUZZ_EXAMPLES" not in os.environ, reason="takes seconds to begin: set FUZZ_EXAMPLES")
def test_every_documented_operation_takes_what_its_schema_allows_and_what_it_forbids(gateway):
    from schemathesis import GenerationMode

    for operation in operations(gateway):
        strategy = operation.as_strategy()
        if operation.body or operation.path_parameters or operation.headers:
            strategy |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

        @MANY
        @given(case=strategy, known=st.integers(0, 9))
        def call(case, known):
            if known:  # else whatever was generated, which names nothing that exists
                subject = gateway.open_subject()
                url = subject["planner"].anthropic_base_url
                given = {"token": url.split("/")[-3], "agent_id": "planner", "workflow_id": gateway.subject_id}
                given["model_id"] = "planner_model"
                case.path_parameters.update({k: v for k, v in given.items() if k in (case.path_parameters or {})})
                if "x-agent-id" in (case.headers or {}):
                    case.headers.update({"x-agent-id": "planner", "x-workflow-id": gateway.subject_id})
            key = {} if known == 1 else gateway.key
            answer = case.call(base_url=gateway.world.base_url, headers=key, timeout=10)
            assert answer.status_code < 500, (answer.status_code, answer.text, case)

        call()
        gateway.check_witness()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
TEXT = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "<tool_call>", "\ufdd0", "\u2028", "a" * 600, ""])
ARGUMENTS = st.sampled_from(["{}", '{"x": 1}', "{", "[" * 400 + "]" * 400, '{"a":' * 300 + "1" + "}" * 300, "\x00"])
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "refusal", "image_url", "thinking", "x"])})
    | st.builds(lambda text: {"type": "text", "text": text}, TEXT)
    | st.builds(lambda i, text: {"type": "tool_result", "tool_use_id": i, "content": text}, TEXT, TEXT | JSON)
    | st.builds(lambda n, i: {"type": "tool_use", "id": "i", "name": n, "input": i}, TEXT, JSON),
    max_size=3,
)
CALLS = st.lists(
    st.builds(lambda n, a: {"id": "c", "type": "function", "function": {"name": n, "arguments": a}}, TEXT, ARGUMENTS),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
            "content": TEXT | PARTS | JSON,
        },
        optional={"tool_calls": CALLS | JSON, "tool_call_id": TEXT | JSON, "name": TEXT | JSON, "x": JSON},
    ),
    min_size=1,
    max_size=4,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
        optional={
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": TEXT | PARTS | JSON,
            "call_id": TEXT,
            "name": TEXT,
            "arguments": ARGUMENTS,
            "output": TEXT | JSON,
        },
    ),
    max_size=3,
)
TOOLS = st.lists(
    st.builds(lambda n, p: {"type": "function", "function": {"name": n, "parameters": p}}, TEXT, JSON)
    | st.builds(lambda n, p: {"name": n, "input_schema": p}, TEXT, JSON)
    | st.builds(lambda n, p: {"type": "function", "name": n, "parameters": p}, TEXT, JSON),
    max_size=2,
)
ALLOWED = st.builds(
    lambda mode, tools, nested: {"type": "allowed_tools", "mode": mode, "tools": tools, **nested},
    st.sampled_from(["auto", "required"]) | JSON,
    TOOLS | JSON,
    st.dictionaries(st.just("allowed_tools"), TOOLS | JSON),
)
SETTINGS = {
    "n": st.integers(0, 20) | JSON,
    "stop": TEXT | st.lists(TEXT, max_size=3) | JSON,
    "stop_sequences": st.lists(TEXT, max_size=3) | JSON,
    "max_tokens": st.integers(-1, 10**12) | JSON,
    "max_completion_tokens": st.integers(1, 100),
    "max_output_tokens": st.integers(0, 100),
    "temperature": st.floats(-1, 3) | JSON,
    "top_p": st.floats(0, 1) | JSON,
    "top_k": st.integers(-2, 2**40),
    "seed": st.integers(-(2**64), 2**64),
    "logit_bias": JSON,
    "stream": st.booleans() | JSON,
    "stream_options": st.just({"include_usage": True}) | JSON,
    "logprobs": st.booleans() | st.integers(-1, 6) | JSON,
    "top_logprobs": st.integers(0, 21),
    "tools": TOOLS | JSON,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | st.just({"type": "auto"}) | ALLOWED | JSON,
    "parallel_tool_calls": st.booleans(),
    "response_format": st.just({"type": "json_object"}) | JSON,
    "text": JSON,
    "chat_template_kwargs": JSON | st.dictionaries(st.sampled_from(["enable_thinking", "messages", "x"]), JSON),
    "instructions": TEXT | JSON,
    "previous_response_id": TEXT | JSON,
    "metadata": st.dictionaries(TEXT, TEXT) | JSON,
    "system": TEXT | PARTS | JSON,
    "echo": st.booleans() | JSON,
    "best_of": JSON,
    "model": TEXT | JSON,
}
PROMPTS = TEXT | st.lists(TEXT | st.integers(-1, 300) | st.lists(st.integers(0, 300), max_size=4), max_size=4) | JSON
NUMBERS = st.floats() | st.integers(-(2**70), 2**70) | JSON
NAMES = st.sampled_from(["planner", "solver", "checker", "subject-1:planner:0"]) | TEXT
REWARDS = NUMBERS | st.lists(NUMBERS, max_size=3) | st.dictionaries(NAMES, NUMBERS | st.lists(NUMBERS, max_size=3))
PROTOCOLS = {
    "chat/completions": {"messages": MESSAGES | JSON},
    "completions": {"prompt": PROMPTS},
    "responses": {"input": TEXT | ITEMS | JSON},
    "messages": {"messages": MESSAGES | JSON, "max_tokens": st.integers(1, 100)},
    "messages/count_tokens": {"messages": MESSAGES | JSON},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_body_breaks_a_session_or_the_other_policy(gateway, protocol):
    needed = PROTOCOLS[protocol]
    fields = st.fixed_dictionaries(needed, optional={k: v for k, v in SETTINGS.items() if k not in needed})

    @MANY
    @given(body=fields, dropped=st.sets(st.sampled_from(sorted(SETTINGS)), min_size=20))
    def call(body, dropped):
        body = {name: value for name, value in body.items() if name not in dropped or name in needed}
        subject = gateway.open_subject()
        url = f"{subject['planner'].openai_base_url}/{protocol}"
        check(gateway.http.post(url, content=json.dumps(body)), body)

    call()
    assert gateway.ask(gateway.open_subject()["planner"]).status_code == 200
    gateway.check_witness()


def test_no_rewards_keep_a_workflow_from_being_finalized(gateway):
    @MANY
    @given(rewards=REWARDS, one=st.booleans(), control=st.booleans())
    def finalize(rewards, one, control):
        subject, subject_id = gateway.open_subject(), gateway.subject_id
        assert gateway.ask(subject["planner"]).status_code == 200
        workflow = f"{gateway.world.base_url}/control/v1/workflows/{subject_id}"
        url = f"{workflow}/rewards" if control else f"{subject['planner'].openai_base_url}/rewards"
        body = json.dumps({"reward" if one else "rewards": rewards})
        check(gateway.http.post(url, content=body, headers=gateway.key), body)
        check(gateway.http.post(f"{workflow}/finalize", content=body, headers=gateway.key), body)
        check(gateway.http.post(f"{workflow}/finalize", json={"rewards": 1.0}, headers=gateway.key), body)
        assert gateway.http.get(workflow, headers=gateway.key).json()["state"] == "closed", body

    finalize()
    gateway.check_witness()


SAID = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", '{"name": ', '"f"', ', "arguments": ', "{", "}"]
        + ['"x"', ": ", "null", "[", "]", "NaN", '"\\ud800"', "1e999", "[" * 1100, "{}}", "😀", "<|im_start|>"]
        + ['<tool_call>\n{"name": "f", "arguments": {"x": "\\ud800"}}\n</tool_call>']
        + ['<tool_call>{"name": "f", "arguments": ' + '{"a":' * 400 + "1" + "}" * 400 + "}</tool_call>"]
        + ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '<tool_call>{"name": 3}</tool_call>']
    )
    | st.text(max_size=5),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("protocol", ["chat/completions", "responses", "messages"])
def test_nothing_that_a_model_says_breaks_its_session_or_the_other_policy(gateway, protocol):
    engine = gateway.world.engines["planner_model"]
    tool = {"name": "f", "parameters": {"type": "object"}}
    asked = [{"role": "user", "content": "x"}]
    body = {
        "chat/completions": {"messages": asked, "tools": [{"type": "function", "function": tool}]},
        "responses": {"input": "x", "tools": [{"type": "function", **tool}]},
        "messages": {"messages": asked, "max_tokens": 4000, "tools": [{"name": "f", "input_schema": {}}]},
    }[protocol]

    @MANY
    @given(said=SAID, stream=st.booleans())
    def call(said, stream):
        ids = gateway.texts.ids(said)
        engine.script = lambda prompt: ids
        url = f"{gateway.open_subject()['planner'].openai_base_url}/{protocol}"
        answer = gateway.http.post(url, json={**body, "stream": stream})
        assert answer.status_code == 200, (answer.text, said)
        assert '"type":"error"' not in answer.text, said
        if protocol == "chat/completions" and not stream:
            message = orjson.loads(answer.content)["choices"][0]["message"]
            history = [*asked, message, {"role": "user", "content": "y"}]
            check(gateway.http.post(url, json={**body, "messages": history}), said)

    try:
        call()
    finally:
        engine.script = gateway.texts.says(SAYS["planner_model"])
    gateway.check_witness()
