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
"""Whole groups become padded batches: nothing changes on the way, and padding weighs nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage  # noqa: E402

from ...ingest.batch_source import Group, TakenBatch  # noqa: E402
from ...runtime.batch_assembly import PAD, assemble, deal_rows, updates_for  # noqa: E402
from ...trajectory import NO_VERSION, Trajectory  # noqa: E402

pytestmark = pytest.mark.slow


def row(group: int, member: int, rng: np.random.Generator, version: int = 3) -> Trajectory:
    n = int(rng.integers(1, 6))
    mask = np.ones(n, dtype=np.uint8)
    if n > 2:
        mask[1] = 0
    return Trajectory(
        trajectory_id=f"g{group}/m{member}",
        workflow_id=f"e0-t{group}-s{member}-a0",
        agent_id="solver",
        model_id="solver_model",
        request_id=f"r{group}-{member}",
        turn=0,
        prompt_ids=rng.integers(3, 90, size=int(rng.integers(1, 7))).astype(np.int32),
        response_ids=rng.integers(3, 90, size=n).astype(np.int32),
        response_mask=mask,
        log_probs=np.where(mask, -rng.random(n), 0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        incarnation=0,
        finish_reason="stop",
        reward=float(rng.random()),
    )


def taken(sizes: list[int], seed: int = 0) -> TakenBatch:
    rng = np.random.default_rng(seed)
    groups = tuple(
        Group(group_id=f"g{g}", agent_id="solver", trajectories=tuple(row(g, m, rng) for m in range(size)))
        for g, size in enumerate(sizes)
    )
    return TakenBatch(batch_id="b0", groups=groups)


@settings(deadline=None)  # a busy machine is no failure
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    dp_size=st.integers(1, 4),
    wanted=st.integers(1, 5),
)
def test_every_mini_batch_holds_a_real_row_and_no_row_is_lost(lengths, dp_size, wanted):
    updates = updates_for(len(lengths), dp_size, wanted)
    order = deal_rows(lengths, dp_size, updates)

    assert sorted(i for i in order if i != PAD) == list(range(len(lengths)))
    width = len(order) // (dp_size * updates)
    slots = [order[i : i + width] for i in range(0, len(order), width)]
    real = [sum(i != PAD for i in slot) for slot in slots]
    assert max(real) - min(real) <= 1
    for k in range(updates):  # the k-th mini-batch is the k-th slot of every rank
        assert sum(real[k::updates]) >= 1


@settings(deadline=None)  # a busy machine is no failure
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), dp_size=st.integers(1, 3), wanted=st.integers(1, 3))
def test_ids_masks_log_probs_and_versions_arrive_exactly_as_sampled(sizes, dp_size, wanted):
    """Invariant 1."""
    batch = taken(sizes)
    data = assemble(batch, dp_size=dp_size, wanted_updates=wanted, pad_token_id=0, version=5).data
    rows = {r.trajectory_id: (g.group_id, r) for g in batch.groups for r in g.trajectories}
    seen = set()
    for i, trajectory_id in enumerate(data.non_tensor_batch["trajectory_id"]):
        if not trajectory_id:
            continue
        seen.add(trajectory_id)
        group_id, r = rows[trajectory_id]
        n = len(r.response_ids)
        prompt_attention = data.batch["attention_mask"][i, : data.batch["prompts"].shape[1]].bool()
        assert data.batch["prompts"][i][prompt_attention].tolist() == r.prompt_ids.tolist()
        assert data.batch["responses"][i, :n].tolist() == r.response_ids.tolist()
        assert data.batch["response_mask"][i].tolist() == r.response_mask.tolist() + [0] * (
            data.batch["responses"].shape[1] - n
        )
        assert data.batch["rollout_log_probs"][i, :n].numpy().tobytes() == r.log_probs.tobytes()
        assert data.batch["rm_scores"][i].sum().item() == pytest.approx(r.reward)
        assert data.non_tensor_batch["uid"][i] == group_id
        assert data.non_tensor_batch["min_global_steps"][i] == 3
    assert seen == set(rows)


@settings(deadline=None)  # a busy machine is no failure
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
)
def test_padding_changes_no_loss(sizes, mode):
    """The loss over the padded batch, with the denominators we give verl, is the plain mean over the real rows."""
    assembled = assemble(taken(sizes), dp_size=2, wanted_updates=1, pad_token_id=0, version=5)
    mask = assembled.data.batch["response_mask"]
    values = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))
    real = mask.sum(-1) > 0

    padded = agg_loss(
        values, mask, mode, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=assembled.real_rows
    )
    per_row = [values[i][mask[i].bool()] for i in torch.nonzero(real).flatten()]
    expected = {
        "token-mean": torch.cat(per_row).mean(),
        "seq-mean-token-sum": torch.stack([row.sum() for row in per_row]).mean(),
        "seq-mean-token-mean": torch.stack([row.mean() for row in per_row]).mean(),
    }[mode]
    assert padded.item() == pytest.approx(expected.item(), rel=1e-5)


@settings(deadline=None)  # a busy machine is no failure
@given(sizes=st.lists(st.integers(2, 5), min_size=1, max_size=5))
def test_padding_changes_no_group_baseline(sizes):
    batch = taken(sizes)
    data = assemble(batch, dp_size=3, wanted_updates=2, pad_token_id=0, version=5).data
    advantages, _ = compute_grpo_outcome_advantage(
        data.batch["rm_scores"].clone(), data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    for group in batch.groups:
        rewards = torch.tensor([r.reward for r in group.trajectories])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for r, advantage in zip(group.trajectories, expected, strict=True):
            i = list(data.non_tensor_batch["trajectory_id"]).index(r.trajectory_id)
            assert advantages[i].max().item() == pytest.approx(max(advantage.item(), 0.0), abs=1e-4)


def test_the_reward_that_is_shown_is_of_new_groups_and_replayed_ones_are_counted():
    """A replayed group tells how good the policy was when it was sampled."""
    new, old = taken([2, 3]).groups
    batch = TakenBatch("b0", (new, replace(old, uses=1)))
    meta = assemble(batch, dp_size=1, wanted_updates=1, pad_token_id=0, version=4).data.meta_info
    assert meta["fully_async/batch/rows"] == 5 and meta["fully_async/batch/replayed_groups"] == 1
    assert meta["fully_async/batch/reward_mean"] == pytest.approx(np.mean([row.reward for row in new.trajectories]))


def test_the_share_that_was_lost_as_stale_is_told_by_turns():
    batch = replace(taken([2]), stale_shares={"1": 0.0, "3-4": 0.25})
    meta = assemble(batch, dp_size=1, wanted_updates=1, pad_token_id=0, version=4).data.meta_info
    told = {key.rsplit("/", 1)[1]: value for key, value in meta.items() if "stale_share" in key}
    assert told == {"turns_1": 0.0, "turns_3-4": 0.25}


def test_short_batches_get_fewer_updates():
    assert updates_for(real_rows=3, dp_size=2, wanted=4) == 1
    assert updates_for(real_rows=9, dp_size=2, wanted=4) == 4
    assert updates_for(real_rows=1, dp_size=4, wanted=2) == 1


def test_the_age_of_the_partners_is_told_by_policy():
    batch = replace(taken([2]), partner_staleness={"planner_model": [1, 4]})
    meta = assemble(batch, dp_size=1, wanted_updates=1, pad_token_id=0, version=3).data.meta_info
    told = {key: value for key, value in meta.items() if "partner" in key}
    at = "fully_async/partner_staleness/planner_model"
    assert told == {f"{at}/mean": 2.5, f"{at}/max": 4}
