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
"""What each sampled token weighs in verl's losses, against plain torch: padding and group sizes change nothing."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from ...ingest.batch_source import Group, TakenBatch  # noqa: E402
from ...runtime.batch_assembly import AssembledBatch, assemble  # noqa: E402
from ...runtime.upstream_ports import UpdateGroup  # noqa: E402
from ..fakes.fake_engine import FakeEngine  # noqa: E402
from ..fakes.gateway_world import Texts, gateway_world  # noqa: E402
from ..fakes.tiny_model_folder import make_model_folder  # noqa: E402
from ..fakes.workflow_records import trajectory  # noqa: E402

pytestmark = pytest.mark.slow

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
SCALE = 16  # loss_scale_factor, which seq-mean-token-sum-norm needs (configuration/training_checks.py)


def batch_of(sizes: list[int]) -> TakenBatch:
    """Groups of ``sizes`` rows, responses of unequal length with context between sampled tokens."""
    draw = np.random.default_rng(len(sizes))

    def row(group: int, member: int):
        length = int(draw.integers(1, 9))
        mask = (draw.random(length) < 0.7).astype(np.uint8)
        mask[-1] = 1
        return trajectory(
            f"e0-t{group}-s{member}-a0",
            prompt_ids=np.arange(1, draw.integers(2, 6), dtype=np.int32),
            response_ids=np.arange(length, dtype=np.int32),
            response_mask=mask,
            log_probs=np.zeros(length, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )

    rows = [tuple(row(group, member) for member in range(size)) for group, size in enumerate(sizes)]
    return TakenBatch("b", tuple(Group(f"g{i}", "planner", members) for i, members in enumerate(rows)))


def denominator(batch: AssembledBatch) -> float:
    """``global_batch_size`` as the recipe gives it to verl's workers."""
    seen = {}
    group = UpdateGroup(SimpleNamespace(update_actor=lambda data: seen.update(data=data)))
    group.batch = batch
    group.update_actor(TensorDict({"x": torch.zeros(1)}, batch_size=[1]))
    assert tu.get_non_tensor_data(seen["data"], "num_mini_batch", None) == batch.updates
    return tu.get_non_tensor_data(seen["data"], "global_batch_size", None)


def weights(batch: AssembledBatch, mode: str, dp_size: int, micro_rows: int) -> torch.Tensor:
    """How much each token of the padded batch counts: the gradient of verl's loss by per-token losses ``[B, R]``.

    As the workers compute it: contiguous rows per rank, contiguous mini-batches in each, micro batches whose losses add
    up, ranks averaged (verl/workers/engine_workers.py:train_mini_batch, workers/utils/losses.py:ppo_loss).
    """
    mask = batch.data.batch["response_mask"].bool()
    losses = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    ranks = torch.arange(len(mask)).reshape(dp_size, batch.updates, -1)  # [rank, mini-batch, row]
    total = 0.0
    for k in range(batch.updates):
        tokens = int(mask[ranks[:, k].flatten()].sum())
        for rank in range(dp_size):
            for rows in ranks[rank, k].split(micro_rows):
                loss = agg_loss(
                    losses[rows],
                    mask[rows],
                    mode,
                    dp_size=dp_size,
                    batch_num_tokens=tokens,
                    global_batch_size=denominator(batch),
                    loss_scale_factor=SCALE,
                )
                total = total + loss / dp_size
    total.backward()
    return losses.grad


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dp_size=st.integers(1, 3),
    wanted=st.integers(1, 3),
    micro_rows=st.integers(1, 4),
)
@pytest.mark.parametrize("mode", MODES)
def test_every_sampled_token_weighs_what_plain_torch_gives_it(mode, sizes, dp_size, wanted, micro_rows):
    """K mini-batches over N real rows: a row weighs K / N, wherever it is; a token 1 / tokens of its mini-batch."""
    batch = assemble(batch_of(sizes), dp_size=dp_size, wanted_updates=wanted, pad_token_id=0, version=0)
    mask = batch.data.batch["response_mask"].double()
    lengths = mask.sum(-1, keepdim=True)
    mini_batches = torch.arange(len(mask)).reshape(dp_size, batch.updates, -1).transpose(0, 1).flatten(1)
    tokens = torch.zeros(len(mask), 1, dtype=torch.float64)
    for rows in mini_batches:
        assert lengths[rows].sum() > 0, "no mini-batch is padding alone"
        tokens[rows] = lengths[rows].sum()
    row = batch.updates / sum(sizes)
    expected = {
        "token-mean": mask / tokens,
        "token-sum": mask,
        "seq-mean-token-sum": mask * row,
        "seq-mean-token-sum-norm": mask * row / SCALE,
        "seq-mean-token-mean": mask * row / lengths.clamp(min=1),
    }[mode]
    torch.testing.assert_close(weights(batch, mode, dp_size, micro_rows), expected, rtol=1e-6, atol=1e-9)


def test_without_a_scale_the_normed_mode_depends_on_padding():
    """What its refusal is for: the micro batch's width is the divisor."""
    values, mask = torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 0, 0]])
    wide = torch.nn.functional.pad(values, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(values, mask, mode) == 2 * agg_loss(*wide, mode)


class HistoryModel(torch.nn.Module):
    """A causal language model of few parameters: each logit depends on every token before it, and on no padding."""

    def __init__(self, vocabulary: int):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = torch.nn.Embedding(vocabulary, 8).double()
        self.head = torch.nn.Linear(8, vocabulary).double()

    def log_probs(self, batch) -> torch.Tensor:
        """Of the response tokens, ``[B, R]``."""
        ids, attention = batch["input_ids"], batch["attention_mask"].unsqueeze(-1)
        seen = (self.embedding(ids) * attention).cumsum(1) / attention.cumsum(1).clamp(min=1)
        shifted = torch.log_softmax(self.head(torch.tanh(seen)), dim=-1)[:, :-1]
        chosen = shifted.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return chosen[:, -batch["responses"].shape[1] :]


def conversations(folder, rows: str) -> list:
    """Rows of two workflows of three turns each, captured by the real gateway."""
    texts = Texts(folder)
    said = {0: ["first", "second thought", "third"], 1: ["1", "2 2 2", "3"]}

    async def run():
        captured = []
        for sample, answers in said.items():
            # The prompt holds every earlier answer: its length tells the turn.
            lengths: list[int] = []

            def script(prompt, answers=answers, lengths=lengths):
                lengths.append(len(prompt))
                return texts.ids(answers[len(lengths) - 1])

            engines = {"planner_model": FakeEngine(script)}
            room = {"planner_model": {"max_response_length": 256, "max_model_len": 768}}
            world_of = gateway_world(folder, engines, mapping={"planner": "planner_model"}, bindings=room, rows=rows)
            async with world_of as world:
                workflow = f"e0-t0-s{sample}-a0"
                client = world.client((await world.open(workflow))["planner"])
                history = []
                for turn in range(3):
                    history.append({"role": "user", "content": f"question {turn}"})
                    answer = await client.chat.completions.create(model="m", messages=history)
                    history.append({"role": "assistant", "content": answer.choices[0].message.content})
                await world.control.finalize(workflow, rewards=float(sample))
                captured += world.sink.rows
        return captured

    return asyncio.run(run())


def gradient(rows: list) -> tuple[torch.Tensor, int]:
    """Of one policy-gradient step on ``rows``: GRPO without deviation, token-mean; and the number of sampled tokens."""
    batch = assemble(TakenBatch("b", (Group("g", "planner", tuple(rows)),)), **ASSEMBLE).data.batch
    model = HistoryModel(int(batch["input_ids"].max()) + 1)
    uid = np.array(["g" if mask.any() else f"pad-{i}" for i, mask in enumerate(batch["response_mask"])])
    advantages, _ = compute_grpo_outcome_advantage(
        batch["rm_scores"].double(), batch["response_mask"], uid, norm_adv_by_std_in_grpo=False
    )
    ratio = torch.exp(model.log_probs(batch) - model.log_probs(batch).detach())
    agg_loss(-advantages * ratio, batch["response_mask"], "token-mean").backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), int(batch["response_mask"].sum())


ASSEMBLE = {"dp_size": 2, "wanted_updates": 1, "pad_token_id": 0, "version": 0}


def test_merged_rows_and_one_row_per_turn_give_the_same_gradient_under_token_mean(tmp_path):
    """Each sampled token stands in either export once, after the same history (semantics of groups and rewards)."""
    folder = make_model_folder(tmp_path / "model")
    per_turn, merged = conversations(folder, "per_call"), conversations(folder, "merged")
    assert (len(per_turn), len(merged)) == (6, 2)
    (one, tokens), (other, same) = gradient(per_turn), gradient(merged)
    assert tokens == same and one.abs().max() > 1e-3
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
