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
"""What is asked and what has to come back: known to the last id, so that nothing that goes astray stays unseen.

A workflow makes four calls: planner, solver, planner again, solver again; the second ones carry the first answer as
history. Every question ends in a tag of twelve digits, one token each, that says model, workflow and turn; every answer
repeats it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipe.multi_policy_async.gateway.client import AgentEndpoints
from recipe.multi_policy_async.gateway.tokenizer import PolicyTokenizer
from recipe.multi_policy_async.tests.fakes.tiny_model_folder import CHATML, SPECIAL
from recipe.multi_policy_async.trajectory import WorkflowRecord

from .engine import log_prob_of
from .load import Request, post

AGENTS = {"planner": "planner_model", "solver": "solver_model"}
MODELS = tuple(AGENTS.values())
CALLS = tuple((agent, turn) for turn in range(2) for agent in AGENTS)
TAG_LENGTH = 12
VERSION = 1

_SYSTEM = """You are one of several agents that work on a task together. Read the task with care, think about what is
asked, and answer in a few short sentences. The planner breaks a task into steps and says for each one what it needs and
what it gives. The solver carries out the steps one by one, checks every intermediate result, and says what it found.
When something is missing, say what it is instead of making it up. Do not repeat the task. Do not apologise. Never
mention these instructions. Use plain words and plain numbers, no tables and no code unless the task asks for them."""
_QUESTION = (
    """A shop sells pens, pencils and paper. A pen costs three times as much as a pencil, and a sheet of paper costs a
tenth of a pen. Somebody buys some of each, pays with a note and gets change. Work out what each thing costs and how
many of each were bought, given that the change was smaller than the price of a pen, and say how you would check it.
Task #""",
    """Thank you. Now take the same shop on a day on which everything costs a fifth less, and say what changes.
Task #""",
)
_ANSWER = (
    "First take the price of a pencil as the unit, then count everything in it and compare with the note in the end."
)


def make_model_folder(folder: Path) -> Path:
    """A byte-level BPE tokenizer of usual shape (digits are single tokens), trained on the texts used here."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([_SYSTEM, *_QUESTION, _ANSWER, *MODELS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": end}))
    return folder


@dataclass(frozen=True)
class Workflow:
    """The ``number``-th workflow of the run."""

    number: int

    @property
    def workflow_id(self) -> str:
        return f"e0-t{self.number}-s0-a0"

    def tag(self, agent: str, turn: int) -> str:
        return f"{MODELS.index(AGENTS[agent])}{self.number:07d}{turn:04d}"


class Traffic:
    """Requests and the answers they must get."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_model_folder(folder)
        self.tokenizer = PolicyTokenizer.load(str(folder))

    def engine_config(self, latency_s: float) -> dict[str, Any]:
        """For ``engine``."""
        before = {model: self.tokenizer.encode(f"{model}: task #") for model in MODELS}
        after = [*self.tokenizer.encode(f". {_ANSWER}"), self.tokenizer.end_of_turn_ids[0]]
        behind = len(self.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"))
        return {
            "shape": {"latency_s": latency_s, "tag_length": TAG_LENGTH, "behind": behind},
            "models": [
                {"name": model, "before": before[model], "after": after, "own": self.tokenizer.encode(str(index))[0]}
                for index, model in enumerate(MODELS)
            ],
        }

    def binding(self, **urls: Any) -> dict[str, Any]:
        """What a model's runtime would bind, but for the model's name."""
        return {
            "model_path": str(self.folder),
            "trained": True,
            "incarnation": 0,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "max_prompt_length": 1024,
            "max_response_length": 128,
            "max_model_len": 1152,
            **urls,
        }

    def to_gateway(self, workflow: Workflow, endpoints: dict[str, AgentEndpoints], agent: str, turn: int) -> Request:
        """An agent's call, as an SDK would send it."""
        body = {"model": agent, "messages": self._messages(workflow, agent, turn), "max_tokens": 64, "temperature": 1.0}
        expected = (
            f'"content":"{self._answer(workflow, agent, turn)}"',
            f'"model_id":"{AGENTS[agent]}"',
            f'"workflow_id":"{workflow.workflow_id}"',
        )
        url = endpoints[agent].openai_base_url + "/chat/completions"
        return post(url, orjson.dumps(body), tuple(part.encode() for part in expected))

    def to_router(self, workflow: Workflow, router_urls: dict[str, str], agent: str, turn: int) -> Request:
        """The same call as the gateway sends it on."""
        body = {
            "input_ids": self.prompt_ids(workflow, agent, turn),
            "rid": f"{workflow.workflow_id}:{agent}:{turn}#0",
            "stream": False,
            "return_logprob": True,
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": 64,
                "stop_token_ids": list(self.tokenizer.end_of_turn_ids),
                "skip_special_tokens": False,
            },
        }
        expected = orjson.dumps(self.answer_ids(workflow, agent, turn))
        return post(router_urls[AGENTS[agent]] + "/generate", orjson.dumps(body), (b'"output_ids":' + expected,))

    def prompt_ids(self, workflow: Workflow, agent: str, turn: int) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.render(self._messages(workflow, agent, turn)))

    def answer_ids(self, workflow: Workflow, agent: str, turn: int) -> list[int]:
        text = self._answer(workflow, agent, turn)
        return [*self.tokenizer.encode(text), self.tokenizer.end_of_turn_ids[0]]

    def _messages(self, workflow: Workflow, agent: str, turn: int) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": _SYSTEM}]
        for each in range(turn + 1):
            messages.append({"role": "user", "content": _QUESTION[each] + workflow.tag(agent, each)})
            if each < turn:
                messages.append({"role": "assistant", "content": self._answer(workflow, agent, each)})
        return messages

    @staticmethod
    def _answer(workflow: Workflow, agent: str, turn: int) -> str:
        return f"{AGENTS[agent]}: task #{workflow.tag(agent, turn)}. {_ANSWER}"

    def wrong_rows(self, record: WorkflowRecord, calls: Sequence[tuple[str, int]]) -> Iterator[str]:
        """What is wrong with a finished workflow that made these calls; nothing, if it is right."""
        workflow = Workflow(int(record.workflow_id.split("-")[1][1:]))
        if record.status != ("ok" if calls else "no_calls"):
            yield f"{record.workflow_id} ended as {record.status}"
        skipped = {agent: min((turn for a, turn in calls if a == agent), default=0) for agent in AGENTS}
        rows = {(row.agent_id, row.turn + skipped[row.agent_id]): row for row in record.trajectories}
        if len(record.trajectories) != len(calls) or set(rows) != set(calls):
            yield f"{record.workflow_id} has rows {sorted(rows)} instead of {sorted(calls)}"
            return
        for (agent, turn), row in rows.items():
            ids = self.answer_ids(workflow, agent, turn)
            right = (
                row.model_id == AGENTS[agent]
                and row.prompt_ids.tolist() == self.prompt_ids(workflow, agent, turn)
                and row.response_ids.tolist() == ids
                and row.response_mask.all()
                and np.array_equal(row.log_probs, np.float32([log_prob_of(token) for token in ids]))
                and (row.versions == VERSION).all()
            )
            if not right:
                yield f"{row.trajectory_id} is not what the engine sampled for it"
