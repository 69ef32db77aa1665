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
"""PolicyTrainer's own decisions: what is consumed, published, saved and dropped. The training itself is verl's."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from ...checkpoint_coordinator import CheckpointSchedule  # noqa: E402
from ...configuration.schema import CheckpointSpec  # noqa: E402
from ...ingest.baselines import Baseline  # noqa: E402
from ...ingest.batch_source import (  # noqa: E402
    End,  # noqa: E402
    Group,
    TakenBatch,
)
from ...runtime import policy_trainer as module  # noqa: E402
from ...runtime.batch_assembly import assemble  # noqa: E402
from ...runtime.policy_trainer import NonFiniteStepError, PolicyTrainer  # noqa: E402
from ...runtime.upstream_ports import UpdateGroup  # noqa: E402
from ...runtime.verl_adapter import TrainingStopException  # noqa: E402
from ...trajectory import Version  # noqa: E402
from ..fakes.workflow_records import trajectory  # noqa: E402

pytestmark = pytest.mark.slow


class FakeSource:
    """Records what the trainer reports about its batches."""

    def __init__(self):
        self.consumed: list[Version] = []
        self.dropped: list[str] = []
        self.asked: list[tuple] = []

    async def hold(self, version: Version, batches_left: int) -> None:
        self.asked.append(("hold", version, batches_left))

    async def next_batch(self, version: Version) -> End:
        self.asked.append(("next_batch", version))
        return End("no more")

    def mark_consumed(self, version: Version) -> None:
        self.consumed.append(version)

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)

    async def flush(self) -> None:
        self.committed = list(self.consumed)


class ScriptedTrainer(PolicyTrainer):
    """A PolicyTrainer whose steps are scripted losses instead of training; ``None`` ends the data."""

    def __init__(self, losses, *, target, trigger=1, every=0, at_end=False, tmp_path=None):
        self.model_id, self.incarnation, self.target_version = "m", 2, target
        self.global_steps = self.current_param_version = self.last_ckpt_version = 0
        self.local_trigger_step, self.trigger_parameter_sync_step = 1, trigger
        self.metrics, self._non_finite_in_a_row = {}, 0
        self._source, self._images = FakeSource(), None
        self._checkpoints = CheckpointSchedule(
            CheckpointSpec(every_updates=every, at_end=at_end, keep=None), tmp_path or Path(), "m"
        )
        self._on_phase = lambda phase, version: None
        self._on_saved = lambda saved: self.saves.append(saved.step)
        self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=None))
        self.logger = SimpleNamespace(finish=lambda: None, log=lambda **_: None)
        self.metrics_aggregator = SimpleNamespace(get_aggregated_metrics=lambda **_: {}, reset=lambda: None)
        self._losses = iter(losses)
        self.published: list[int] = []
        self.saves: list[int] = []

    async def fit_step(self, batch_dict=None):
        loss = next(self._losses, None)
        if loss is None:
            raise TrainingStopException
        self.metrics = {"actor/loss": loss, "actor/grad_norm": 1.0}
        self._fit_update_local_step()
        await self._fit_update_weights()
        self._fit_save_checkpoint()

    async def _fit_update_weights(self):
        if self.local_trigger_step == 1:
            self.published.append(self.current_param_version)
        return {}

    def _save_checkpoint(self):
        folder = f"{self.config.trainer.default_local_dir}/global_step_{self.current_param_version}"
        path = Path(folder)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(b"w")


def test_training_ends_at_the_target_version():
    trainer = ScriptedTrainer([0.1] * 9, target=3)
    asyncio.run(trainer.fit())
    assert trainer.published == [1, 2, 3]


def test_rows_are_marked_with_the_version_that_first_holds_them():
    """Restoring version v must queue again exactly the rows of later versions (invariant 2)."""
    trainer = ScriptedTrainer([0.1] * 4, target=2, trigger=2)
    asyncio.run(trainer.fit())
    assert trainer._source.consumed == [Version(2, 1), Version(2, 1), Version(2, 2), Version(2, 2)]


@pytest.mark.parametrize(("step", "batches_left"), [(1, 2), (3, 0)])
def test_a_trainer_asks_whether_to_hold_before_each_batch(step, batches_left):
    """After the step it would be too late: what waits is a version older by then."""
    trainer = ScriptedTrainer([], target=None, trigger=3)
    trainer.local_trigger_step = step
    assert asyncio.run(trainer._get_samples_from_queue()) == (None, None)
    version = Version(2, trainer.current_param_version)
    assert trainer._source.asked == [("hold", version, batches_left), ("next_batch", version)]


def test_rows_are_committed_as_consumed_before_training_ends():
    trainer = ScriptedTrainer([0.1, 0.1], target=None, trigger=1)
    asyncio.run(trainer.fit())
    assert trainer._source.committed == [Version(2, 1), Version(2, 2)]


def test_the_end_of_the_data_closes_an_open_cycle_as_a_version():
    trainer = ScriptedTrainer([0.1, 0.1, 0.1], target=None, trigger=2)
    asyncio.run(trainer.fit())
    assert trainer.published == [1, 2]


def test_the_end_of_the_data_at_a_version_boundary_publishes_nothing_more():
    trainer = ScriptedTrainer([0.1, 0.1], target=None, trigger=2)
    asyncio.run(trainer.fit())
    assert trainer.published == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_step_is_neither_consumed_nor_published(bad):
    trainer = ScriptedTrainer([0.1, bad, 0.1], target=2)
    asyncio.run(trainer.fit())
    assert trainer._source.dropped == ["non_finite"]
    assert len(trainer._source.consumed) == 2
    assert trainer.published == [1, 2]


def test_non_finite_steps_in_a_row_end_the_training():
    trainer = ScriptedTrainer([math.nan] * module.MAX_NON_FINITE_IN_A_ROW, target=2)
    with pytest.raises(NonFiniteStepError, match="m at version 0"):
        asyncio.run(trainer.fit())
    assert trainer.published == []


def test_saves_happen_at_version_boundaries_only(tmp_path):
    trainer = ScriptedTrainer([0.1] * 12, target=4, trigger=3, every=2, tmp_path=tmp_path)
    asyncio.run(trainer.fit())
    assert trainer.saves == [2, 4]


def test_the_last_version_is_saved_once(tmp_path):
    trainer = ScriptedTrainer([0.1] * 2, target=2, every=1, at_end=True, tmp_path=tmp_path)
    asyncio.run(trainer.fit())
    assert trainer.saves == [1, 2]


def test_checkpoints_of_an_incarnation_have_a_folder_of_their_own(tmp_path):
    trainer = ScriptedTrainer([0.1], target=1, at_end=True, tmp_path=tmp_path)
    asyncio.run(trainer.fit())
    assert (tmp_path / "checkpoints" / "m" / "incarnation_2" / "global_step_1" / "weights").exists()


class RestoredTrainer(ScriptedTrainer):
    """Loads as upstream's ``load_checkpoint`` does, without files."""

    async def load_checkpoint(self):
        trainer = self.config.trainer
        assert trainer.resume_mode == "resume_path"
        self.current_param_version = int(trainer.resume_from_path.split("global_step_")[-1])
        self.global_steps = self.current_param_version * self.trigger_parameter_sync_step + 1
        self.last_ckpt_version = self.current_param_version


def test_a_restored_policy_counts_versions_and_steps_on(tmp_path):
    trainer = RestoredTrainer([0.1] * 9, target=6, trigger=2, every=2, tmp_path=tmp_path)
    asyncio.run(trainer.restore(tmp_path / "incarnation_1" / "global_step_4"))
    assert trainer.global_steps == 8, "upstream's fit counts the next one itself"
    asyncio.run(trainer.fit())
    assert (trainer.published, trainer.saves) == ([5, 6], [6])
    assert trainer._source.consumed[0] == Version(2, 5)


def test_a_policy_restored_at_its_target_trains_and_saves_nothing_more(tmp_path):
    trainer = RestoredTrainer([0.1] * 9, target=4, every=2, at_end=True, tmp_path=tmp_path)
    asyncio.run(trainer.restore(tmp_path / "incarnation_1" / "global_step_4"))
    asyncio.run(trainer.fit())
    assert (trainer.published, trainer.saves) == ([], [])


@pytest.mark.parametrize(("norm_adv_by_std_in_grpo", "seen"), [(True, (3 - 1) / 2), (False, 3 - 1)])
def test_a_row_that_is_compared_with_an_average_is_shaped_as_the_policys_estimator_needs_it(
    norm_adv_by_std_in_grpo, seen
):
    """Reward 3, average 1, variance 4."""
    workflow = "e0-t0-s0-a0"
    lone = Group("g", "planner", (trajectory(workflow, reward=3.0),), (Baseline(9, mean=1.0, variance=4.0),))
    trainer = ScriptedTrainer([], target=None)
    trainer.config.algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    trainer.tokenizer, trainer.message_queue_client = SimpleNamespace(pad_token_id=0), SimpleNamespace()
    trainer.actor_wg, trainer.actor_rollout_wg = None, SimpleNamespace()
    trainer._get_dp_size, trainer.use_critic, trainer.require_batches = lambda *_: 1, False, 1

    async def next_batch(version):
        return TakenBatch("b", (lone,))

    trainer._source.next_batch = next_batch
    _, data = asyncio.run(trainer._get_samples_from_queue())
    assert data.batch["rm_scores"].sum().item() == pytest.approx(seen, abs=1e-5)
    assert data.non_tensor_batch["uid"].tolist() == [f"{workflow}/planner/0"]  # a group of its own


def test_padding_is_in_no_length_and_no_number_of_tokens_that_is_logged():
    """Three rows over two ranks: one of the four rows is padding, of one prompt token."""
    rows = tuple(trajectory(f"e0-t0-s{i}-a0", reward=float(i)) for i in range(3))
    taken = TakenBatch("b", (Group("g", "planner", rows),))
    padded = assemble(taken, dp_size=2, wanted_updates=1, pad_token_id=0, version=0).data
    assert padded.batch.batch_size[0] == 4
    for name in ("token_level_scores", "token_level_rewards"):
        padded.batch[name] = padded.batch["rm_scores"]
    for name in ("advantages", "returns"):
        padded.batch[name] = padded.batch["rm_scores"] * padded.batch["response_mask"]
    trainer = ScriptedTrainer([], target=None)
    trainer.timing_raw, trainer.use_critic = {"step": 2.0, "gen": 1.0}, False
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    trainer._fit_collect_metrics(padded)
    prompt, response = len(rows[0].prompt_ids), len(rows[0].response_ids)
    told = trainer.metrics
    assert prompt > 1, "else padding would not be seen"
    assert (told["prompt_length/mean"], told["prompt_length/min"]) == (prompt, prompt)
    assert (told["response_length/mean"], told["response_length/min"]) == (response, response)
    assert told["response/aborted_ratio"] == 0
    assert told["perf/total_num_tokens"] == 3 * (prompt + response)


class RecordingGroup:
    """A worker group that keeps the data it was asked to update on."""

    def update_actor(self, data):
        self.data = data


def test_updates_use_the_real_rows_as_denominator_and_a_number_of_mini_batches():
    inner = RecordingGroup()
    group = UpdateGroup(inner)
    group.batch = SimpleNamespace(updates=3, real_rows=12)
    data = TensorDict({"x": torch.zeros(15)}, batch_size=[15])
    tu.assign_non_tensor(data, mini_batch_size=8, global_batch_size=8)
    group.update_actor(data)
    assert "mini_batch_size" not in inner.data.keys()
    assert tu.get_non_tensor_data(inner.data, "num_mini_batch", None) == 3
    assert tu.get_non_tensor_data(inner.data, "global_batch_size", None) == 4
