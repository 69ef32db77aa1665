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
"""From whole advantage groups to the padded batch that verl's trainer expects."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl import DataProto

from ..ingest.batch_source import Group, TakenBatch
from ..trajectory import Trajectory
from .image_inputs import ImageInputs

PAD = -1


def updates_for(real_rows: int, dp_size: int, wanted: int) -> int:
    """Mini-batches that ``real_rows`` can fill: ``wanted``, fewer when rows are short, at least one."""
    return max(1, min(wanted, real_rows // dp_size))


def deal_rows(lengths: Sequence[int], dp_size: int, updates: int) -> list[int]:
    """Order rows for a contiguous split over ranks, then over each rank's mini-batches.

    Long rows are dealt first, back and forth, so tokens balance and every (rank, mini-batch) slot holds the same
    number of real rows, give or take one; the rest is padding. verl's ``_balance_batch`` would collect the paddings in
    one mini-batch, whose loss is 0/0.

    Args:
        lengths: tokens per real row, ``[N]``.
        dp_size: data-parallel ranks.
        updates: mini-batches per rank.

    Returns:
        Row indices, ``PAD`` for a padding row; ``dp_size * updates * ceil(N / (dp_size * updates))`` entries.
    """
    n_slots = dp_size * updates
    slots: list[list[int]] = [[] for _ in range(n_slots)]
    for rank, row in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, position = divmod(rank, n_slots)
        slots[position if turn % 2 == 0 else n_slots - 1 - position].append(row)
    width = math.ceil(len(lengths) / n_slots)
    return [row for slot in slots for row in slot + [PAD] * (width - len(slot))]


@dataclass(frozen=True)
class AssembledBatch:
    """A batch for the trainer, with the numbers that its loss denominators need."""

    data: DataProto
    real_rows: int
    updates: int


def assemble(
    taken: TakenBatch,
    *,
    dp_size: int,
    wanted_updates: int,
    pad_token_id: int,
    version: int,
    by_std: bool = True,
    images: ImageInputs | None = None,
) -> AssembledBatch:
    """Turn groups into a ``DataProto`` in verl's left/right-padded layout.

    Tensors: ``prompts [B, P]`` (left-padded), ``responses [B, R]``, ``input_ids``, ``attention_mask``,
    ``position_ids [B, P + R]``, ``response_mask``, ``rollout_log_probs``, ``rm_scores [B, R]`` (the reward at the last
    response token). ``uid`` is the advantage group. Padding rows keep one prompt token, have an empty response, zero
    reward and a uid of their own, so they change neither a loss nor a group's baseline.

    A row of a group with ``baselines`` gets a uid of its own and its advantage over the baseline as reward: estimators
    that compare groups hand a group of one its reward as advantage (core_algos.py, ``len(id2score[idx]) == 1``).

    Args:
        taken: whole groups; every trajectory has a reward.
        dp_size: data-parallel ranks of the actor.
        wanted_updates: mini-batches per batch (verl's ``require_batches``).
        pad_token_id: id of padding tokens.
        version: the trainer's version before this step, for the staleness metrics.
        by_std: whether the estimator divides by the deviation, so that rows with a baseline must be too.
        images: of a model that takes images: then every row has ``multi_modal_inputs``, and ``position_ids`` are
            ``[B, 4, P + R]``.
    """
    rows = [placed for group in taken.groups for placed in _place(group, by_std)]
    assert rows, "a taken batch has at least one row"
    lengths = [len(row.prompt_ids) + len(row.response_ids) for _, row, _ in rows]
    updates = updates_for(len(rows), dp_size, wanted_updates)
    order = deal_rows(lengths, dp_size, updates)

    width_p = max(len(row.prompt_ids) for _, row, _ in rows)
    width_r = max(len(row.response_ids) for _, row, _ in rows)
    ids = np.full((len(order), width_p + width_r), pad_token_id, dtype=np.int64)
    attention = np.zeros_like(ids)
    mask = np.zeros((len(order), width_r), dtype=np.int64)
    log_probs = np.zeros((len(order), width_r), dtype=np.float32)
    scores = np.zeros((len(order), width_r), dtype=np.float32)
    uids, oldest, newest, trajectory_ids = [], [], [], []
    placed: list[Trajectory | None] = []
    for i, index in enumerate(order):
        if index == PAD:
            placed.append(None)
            attention[i, width_p - 1] = 1
            uids.append(f"pad-{i}")
            trajectory_ids.append("")
            oldest.append(version)
            newest.append(version)
            continue
        uid, row, score = rows[index]
        placed.append(row)
        p, r = len(row.prompt_ids), len(row.response_ids)
        ids[i, width_p - p : width_p] = row.prompt_ids
        ids[i, width_p : width_p + r] = row.response_ids
        attention[i, width_p - p : width_p + r] = 1
        mask[i, :r] = row.response_mask
        log_probs[i, :r] = row.log_probs
        scores[i, r - 1] = score
        span = row.version_span
        uids.append(uid)
        trajectory_ids.append(row.trajectory_id)
        oldest.append(span.oldest.number)
        newest.append(span.newest.number)

    data = DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(ids[:, :width_p].copy()),
            "responses": torch.from_numpy(ids[:, width_p:].copy()),
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "position_ids": torch.from_numpy(np.clip(attention.cumsum(axis=1) - 1, 0, None)),
            "response_mask": torch.from_numpy(mask),
            "rollout_log_probs": torch.from_numpy(log_probs),
            "rm_scores": torch.from_numpy(scores),
        },
        non_tensors={
            "uid": np.array(uids, dtype=object),
            "trajectory_id": np.array(trajectory_ids, dtype=object),
            "min_global_steps": np.array(oldest),
            "max_global_steps": np.array(newest),
        },
    )
    data.meta_info.update(
        global_token_num=attention.sum(axis=1).tolist(),
        trajectory_param_versions=newest,
        **_metrics(taken, version, len(order) - len(rows), updates < wanted_updates),
        **_partner_metrics(taken.partner_staleness),
    )
    if images is not None:
        _add_images(data, images, placed)
    return AssembledBatch(data, real_rows=len(rows), updates=updates)


def _add_images(data: DataProto, images: ImageInputs, rows: list[Trajectory | None]) -> None:
    inputs, data.batch["position_ids"] = images.columns(rows, data.batch["attention_mask"])
    column = np.empty(len(inputs), dtype=object)
    column[:] = inputs
    data.non_tensor_batch["multi_modal_inputs"] = column
    lengths = [row["images_seqlens"].tolist() for row in inputs if row]
    data.meta_info["images_seqlens"] = [length for of_row in lengths for length in of_row]


def divides_by_std(algorithm: Mapping[str, Any]) -> bool:
    """Whether verl's estimator divides what a row gains over its group by the group's deviation."""
    return algorithm["adv_estimator"] in ("grpo", "grpo_vectorized") and algorithm["norm_adv_by_std_in_grpo"]


def _place(group: Group, by_std: bool) -> list[tuple[str, Trajectory, float]]:
    """Each row of a group with its uid and the reward that the estimator sees."""
    for row in group.trajectories:
        assert row.reward is not None, f"trajectory {row.trajectory_id} was queued without a reward"
    if group.baselines is None:
        return [(group.group_id, row, row.reward) for row in group.trajectories]
    pairs = zip(group.trajectories, group.baselines, strict=True)
    return [(row.trajectory_id, row, baseline.advantage(row.reward, by_std=by_std)) for row, baseline in pairs]


def _metrics(taken: TakenBatch, version: int, pads: int, fewer_updates: bool) -> dict[str, float]:
    """Numbers about the batch; verl copies meta entries that begin with ``fully_async`` into the step's metrics.

    The reward is of rows that are trained for the first time: it tells how good the policy is now.
    """
    rows = [row for group in taken.groups for row in group.trajectories]
    fresh = [row for group in taken.groups if not group.uses for row in group.trajectories] or rows
    staleness = [version - row.version_span.oldest.number for row in rows]
    spans = [row.version_span.newest.number - row.version_span.oldest.number for row in rows]
    return {
        "fully_async/batch/reward_mean": float(np.mean([row.reward for row in fresh])),
        "fully_async/batch/rows": len(rows),
        "fully_async/batch/padding_rows": pads,
        "fully_async/batch/fewer_updates": int(fewer_updates),
        "fully_async/batch/baseline_rows": sum(
            len(group.trajectories) for group in taken.groups if group.baselines is not None
        ),
        "fully_async/batch/replayed_groups": sum(group.uses > 0 for group in taken.groups),
        "fully_async/staleness/mean": float(np.mean(staleness)),
        "fully_async/staleness/max": int(max(staleness)),
        "fully_async/partial/total_partial_num": sum(span > 0 for span in spans),
        "fully_async/partial/max_partial_span": max(spans),
        **{f"fully_async/stale_share/turns_{turns}": share for turns, share in taken.stale_shares.items()},
    }


def _partner_metrics(ages: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Versions that each partner policy has made since the batch's workflows were played."""
    metrics: dict[str, float] = {}
    for model_id, own in ages.items():
        metrics[f"fully_async/partner_staleness/{model_id}/mean"] = float(np.mean(own))
        metrics[f"fully_async/partner_staleness/{model_id}/max"] = max(own)
    return metrics
