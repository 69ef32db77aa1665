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
"""From rewards to advantages: which rows are compared, and with what. The numbers in comments are worked by hand."""

import math

import numpy as np
import pytest

pytest.importorskip("verl")

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

from ...configuration.training_checks import AVERAGE_ESTIMATORS  # noqa: E402
from ...ingest.baselines import Baseline  # noqa: E402
from ...ingest.batch_source import Group, TakenBatch  # noqa: E402
from ...runtime.batch_assembly import assemble, divides_by_std  # noqa: E402
from ...runtime.estimator_check import check_estimator  # noqa: E402
from ...trajectory import Version  # noqa: E402
from ..fakes.workflow_records import PLANNER, queue_spec, record, trajectory, with_ingestor  # noqa: E402

pytestmark = pytest.mark.slow

V0 = Version(0, 0)
HALF = math.sqrt(0.5)


def algorithm(estimator: str = "grpo", **settings):
    defaults = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    return OmegaConf.create({"adv_estimator": estimator, **defaults, **settings})


async def play(ingestor, *tasks) -> None:
    """End tasks; a task is its workflows, a workflow its calls ``(agent, turn, reward)``."""
    for number, workflows in enumerate(tasks):
        ids = [f"e0-t{number}-s{sample}-a0" for sample in range(len(workflows))]
        for workflow_id, calls in zip(ids, workflows, strict=True):
            await ingestor.issue(workflow_id, len(workflows))
            rows = [
                trajectory(
                    workflow_id, agent_id=agent, turn=turn, reward=reward, trajectory_id=f"{workflow_id}/{agent}/{turn}"
                )
                for agent, turn, reward in calls
            ]
            await ingestor.ingest(record(workflow_id, *rows))


def taken(tmp_path, *tasks, **queue) -> tuple[TakenBatch | None, dict]:
    """What a trainer gets of ``tasks``, through the real ingestor, and its policy's numbers."""

    async def scenario(ingestor):
        await ingestor.register_policy(PLANNER, queue_spec(**queue), True)
        await play(ingestor, *tasks)
        batch = await ingestor.take(PLANNER, (await ingestor.stats())[PLANNER]["queue_groups"] or 1, V0, 0.01)
        stats = (await ingestor.stats())[PLANNER]
        assert stats["unaccounted"] == 0, "invariant 3"
        return batch, stats

    return with_ingestor(tmp_path, scenario)


def advantages(batch: TakenBatch, settings=None) -> dict[str, float]:
    """verl's advantage of each row, by the end of its trajectory id (``s0/planner/0``), in a padded batch."""
    settings = settings or algorithm()
    by_std = divides_by_std(settings)
    data = assemble(batch, dp_size=2, wanted_updates=2, pad_token_id=0, version=0, by_std=by_std).data
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    name, norm = settings.adv_estimator, settings.norm_adv_by_std_in_grpo
    data = compute_advantage(data, name, norm_adv_by_std_in_grpo=norm, config=settings)
    found = {}
    for i, trajectory_id in enumerate(data.non_tensor_batch["trajectory_id"]):
        masked = data.batch["advantages"][i][data.batch["response_mask"][i].bool()]
        if trajectory_id:
            assert torch.allclose(masked, masked[:1]), "one advantage per row"
            found[trajectory_id.partition("-s")[2].replace("-a0", "")] = masked[0].item()
        else:
            assert not data.batch["advantages"][i].any(), "padding has no advantage"
    return found


class TestWhoIsComparedWithWhom:
    def test_agent_wise_normalisation_of_dr_mas(self, tmp_path):
        """Each agent by its own mean and deviation over its calls (Dr. MAS, arXiv:2602.08847, equation 5).

        planner: 0, 1        mean 0.5, deviation sqrt(0.5)  ->  -0.5 / sqrt(0.5) = -sqrt(0.5), +sqrt(0.5)
        critic:  10, 12, 14  mean 12,  deviation 2          ->  -1, 0, +1; its scale does not touch the planner
        """
        first = [("planner", 0, 0.0), ("critic", 0, 10.0), ("critic", 1, 12.0)]
        second = [("planner", 0, 1.0), ("critic", 0, 14.0)]
        batch, _ = taken(tmp_path, [first, second], group_by="task_agent")
        assert advantages(batch) == pytest.approx(
            {"0/planner/0": -HALF, "1/planner/0": HALF, "0/critic/0": -1, "0/critic/1": 0, "1/critic/0": 1}, abs=1e-5
        )

    def test_agent_and_turn_wise_groups_of_at_grpo(self, tmp_path):
        """Only calls of one agent in one turn are compared (AT-GRPO, arXiv:2510.11062).

        turn 0: 0, 1  mean 0.5, deviation sqrt(0.5)  ->  -sqrt(0.5), +sqrt(0.5)
        turn 1: 2, 6  mean 4,   deviation sqrt(8)    ->  -2 / sqrt(8) = -sqrt(0.5), +sqrt(0.5)
        """
        workflows = [[("planner", 0, 0.0), ("planner", 1, 6.0)], [("planner", 0, 1.0), ("planner", 1, 2.0)]]
        batch, _ = taken(tmp_path, workflows, group_by="task_agent_turn")
        assert advantages(batch) == pytest.approx(
            {"0/planner/0": -HALF, "1/planner/0": HALF, "0/planner/1": HALF, "1/planner/1": -HALF}, abs=1e-5
        )

    def test_all_agents_of_a_policy_in_one_group(self, tmp_path):
        """planner 0, 1 and critic 2, 5: mean 2, deviation sqrt((4 + 1 + 0 + 9) / 3) = sqrt(14 / 3)."""
        workflows = [[("planner", 0, 0.0), ("critic", 0, 2.0)], [("planner", 0, 1.0), ("critic", 0, 5.0)]]
        batch, _ = taken(tmp_path, workflows, group_by="task")
        assert [(group.group_id, group.agent_id) for group in batch.groups] == [("e0-t0", "")]
        by_hand = {"0/planner/0": -2.0, "0/critic/0": 0.0, "1/planner/0": -1.0, "1/critic/0": 3.0}
        deviation = math.sqrt(14 / 3)
        assert advantages(batch) == pytest.approx({k: v / deviation for k, v in by_hand.items()}, abs=1e-5)
        plain = advantages(batch, algorithm(norm_adv_by_std_in_grpo=False))
        assert plain == pytest.approx(by_hand, abs=1e-5)

    @pytest.mark.parametrize("group_by", ["task_agent", "task_agent_turn", "task"])
    def test_with_one_agent_and_one_turn_every_grouping_is_verls_grpo(self, tmp_path, group_by):
        rewards = np.random.default_rng(5).normal(size=(3, 4)).round(3)
        tasks = [[[("planner", 0, reward)] for reward in task] for task in rewards.tolist()]
        batch, _ = taken(tmp_path, *tasks, group_by=group_by)
        ours = [advantages(TakenBatch("b", (group,))) for group in batch.groups]
        verls, _ = compute_grpo_outcome_advantage(
            torch.tensor(rewards.reshape(-1, 1)), torch.ones(12, 1), np.repeat(["a", "b", "c"], 4)
        )
        flat = [group[f"{sample}/planner/0"] for group in ours for sample in range(4)]
        assert flat == pytest.approx(verls.flatten().tolist(), abs=1e-5)


class TestSmallGroups:
    # One workflow in two calls the verifier: its groups have one row. Rewards 1, 0, 1 in this order.
    TASKS = [[[("verifier", 0, reward)], []] for reward in (1.0, 0.0, 1.0)]
    EMA = {"on_small_group": "ema", "ema_decay": 0.5}

    def test_they_are_left_out_with_their_reason_by_default(self, tmp_path):
        batch, stats = taken(tmp_path, *self.TASKS)
        assert batch is None and stats["dropped"] == {"group_too_small": 3}

    def test_rows_count_and_not_workflows(self, tmp_path):
        """Of two workflows one calls the verifier, in two turns: two rows are compared with each other."""
        task = [[("verifier", 0, 1.0), ("verifier", 1, 0.0)], []]
        batch, stats = taken(tmp_path, task)
        assert stats["dropped"] == {} and batch.groups[0].baselines is None
        assert [math.copysign(1, a) for a in advantages(batch).values()] == [1, -1]

    def test_or_compared_with_a_moving_average_of_their_agents_rewards(self, tmp_path):
        """Decay 0.5: after 1, 0, 1 the average is 1, 0.5, 0.75 and the variance 0, 0.25, 0.1875:
        0.5 (0 + 0.5 * 1^2) = 0.25 and 0.5 (0.25 + 0.5 * 0.5^2) = 0.1875.

        Taken now, each row with its own reward once more:
        reward 1: average 0.875, variance 0.5 (0.1875 + 0.5 * 0.25^2) = 0.109375, 0.125 / 0.330719 = sqrt(1 / 7)
        reward 0: average 0.375, variance 0.5 (0.1875 + 0.5 * 0.75^2) = 0.234375, -0.375 / 0.484123 = -sqrt(0.6)
        """
        batch, stats = taken(tmp_path, *self.TASKS, **self.EMA)
        assert stats["dropped"] == {} and [len(group.trajectories) for group in batch.groups] == [1, 1, 1]
        ours = [advantages(TakenBatch("b", (group,)))["0/verifier/0"] for group in batch.groups]
        assert ours == pytest.approx([math.sqrt(1 / 7), -math.sqrt(0.6), math.sqrt(1 / 7)], abs=1e-4)
        without_std = [
            advantages(TakenBatch("b", (group,)), algorithm(norm_adv_by_std_in_grpo=False))["0/verifier/0"]
            for group in batch.groups
        ]
        assert without_std == pytest.approx([0.125, -0.375, 0.125], abs=1e-6)

    def test_the_members_of_a_small_group_are_not_compared_with_each_other(self, tmp_path):
        tasks = [[[("planner", 0, 1.0)], [("planner", 0, 1.0)], []], [[("planner", 0, 0.0)], [("planner", 0, 0.0)], []]]
        batch, _ = taken(tmp_path, *tasks, min_group_size=3, **self.EMA)
        for group, sign in zip(batch.groups, (1, -1), strict=True):
            assert [math.copysign(1, a) for a in advantages(TakenBatch("b", (group,))).values()] == [sign, sign]

    def test_agents_have_averages_of_their_own_and_large_groups_feed_them_too(self, tmp_path):
        large = [[("planner", 0, 4.0), ("critic", 0, 1.0)], [("planner", 0, 6.0)]]
        batch, _ = taken(tmp_path, large, [[("planner", 0, 5.0)], []], on_small_group="ema", ema_decay=0.98)
        by_id = {group.group_id: group for group in batch.groups}
        assert by_id["e0-t0/planner"].baselines is None
        assert by_id["e0-t0/critic"].baselines[0].mean == pytest.approx(1.0)
        # The first rewards weigh alike: the mean of 4, 6, 5, and once more the row's own 5.
        assert by_id["e0-t1/planner"].baselines[0].mean == pytest.approx(5.0)
        assert by_id["e0-t1/planner"].baselines[0].rewards == 4

    def test_the_averages_outlive_the_ingest_process(self, tmp_path):
        async def fill(ingestor):
            await ingestor.register_policy(PLANNER, queue_spec(**self.EMA), True)
            await play(ingestor, *self.TASKS)

        async def take(ingestor):
            await ingestor.register_policy(PLANNER, queue_spec(**self.EMA), True)
            return await ingestor.take(PLANNER, 3, V0, 0.01)

        with_ingestor(tmp_path, fill)
        batch = with_ingestor(tmp_path, take)
        assert [group.baselines[0].mean for group in batch.groups] == pytest.approx([0.875, 0.375, 0.875])

    @pytest.mark.parametrize("estimator", AVERAGE_ESTIMATORS)
    def test_every_estimator_that_is_allowed_hands_the_advantage_through(self, estimator):
        """A lone row with reward 3, average 1 and variance 4, beside a whole group of -1 and 1 (mean 0)."""
        settings = algorithm(estimator)
        lone = Group("e0-t1/p", "p", (row(1, 0, 3.0),), (Baseline(9, mean=1.0, variance=4.0),))
        batch = TakenBatch("b", (Group("e0-t0/p", "p", (row(0, 0, -1.0), row(0, 1, 1.0))), lone))
        found = advantages(batch, settings)
        if estimator == "reinforce_plus_plus_baseline":
            # Six sampled tokens, two a row, of -1, 1 and 3 - 1 = 2, whitened: the mean is 2/3, the sum of squared
            # distances 2 (25/9 + 1/9 + 16/9) = 28/3, the variance 28/15, and (2 - 2/3) / sqrt(28/15) the last one.
            assert found["0/p/1"] == pytest.approx((4 / 3) / math.sqrt(28 / 15), abs=1e-4)
        else:
            assert found["0/p/1"] == pytest.approx((3 - 1) / 2 if divides_by_std(settings) else 3 - 1, abs=1e-4)

    def test_vectorised_rloo_would_not(self):
        """What its refusal is for."""
        lone = Group("e0-t1/p", "p", (row(1, 0, 3.0),), (Baseline(9, mean=1.0, variance=4.0),))
        assert advantages(TakenBatch("b", (lone,)), algorithm("rloo_vectorized")) == {"0/p/1": 0.0}


def row(task: int, sample: int, reward: float):
    workflow_id = f"e0-t{task}-s{sample}-a0"
    return trajectory(workflow_id, agent_id="p", reward=reward, trajectory_id=f"{workflow_id}/p/{task}")


class TestBaseline:
    def test_the_first_rewards_weigh_alike(self):
        """1, 2, 6: mean 3, population variance (4 + 1 + 9) / 3."""
        baseline = Baseline()
        for reward in (1.0, 2.0, 6.0):
            baseline = baseline.observe(reward, decay=0.98)
        assert (baseline.mean, baseline.variance) == pytest.approx((3.0, 14 / 3))

    @pytest.mark.parametrize("decay", [0.5, 0.9, 0.98])
    def test_no_advantage_is_larger_than_in_a_group_however_alike_all_other_rewards_were(self, decay):
        baseline = Baseline()
        for _ in range(500):
            baseline = baseline.observe(1.0, decay)
        bound = math.sqrt(decay / (1 - decay))
        assert abs(baseline.observe(0.0, decay).advantage(0.0, by_std=True)) <= bound
        assert baseline.observe(1.0, decay).advantage(1.0, by_std=True) == 0.0


class TestFiltering:
    def test_groups_of_equal_rewards_are_dropped_as_filtered_if_that_is_asked_for(self, tmp_path):
        equal, unequal = [[("planner", 0, 1.0)], [("planner", 0, 1.0)]], [[("planner", 0, 1.0)], [("planner", 0, 0.0)]]
        batch, stats = taken(tmp_path, equal, unequal, equal, filter_equal_rewards=True)
        assert [group.group_id for group in batch.groups] == ["e0-t1/planner"]
        assert stats["dropped"] == {"filtered": 4}
        batch, stats = taken(tmp_path / "off", equal, unequal)
        assert len(batch.groups) == 2 and stats["dropped"] == {}

    def test_a_group_too_small_to_be_compared_is_not_filtered(self, tmp_path):
        batch, stats = taken(tmp_path, [[("planner", 0, 1.0)], []], filter_equal_rewards=True, min_group_size=1)
        assert len(batch.groups) == 1 and stats["dropped"] == {}
        pair = [[("planner", 0, 1.0)], [("planner", 0, 1.0)], []]
        ema = {"min_group_size": 3, "on_small_group": "ema"}
        batch, stats = taken(tmp_path / "ema", pair, filter_equal_rewards=True, **ema)
        assert len(batch.groups) == 1 and stats["dropped"] == {}

    def test_filtered_groups_do_not_count_against_the_lead(self, tmp_path):
        """Production goes on until there is enough to train on, as in DAPO's dynamic sampling."""
        equal = [[("planner", 0, 1.0)], [("planner", 0, 1.0)]]
        _, stats = taken(tmp_path, *[equal] * 5, filter_equal_rewards=True)
        assert stats["lead_groups"] == 0 and stats["idle_tasks"] == 5


class TestUsersEstimators:
    def test_one_that_leaves_padding_alone_is_accepted(self):
        @register_adv_est("test_median_baseline")
        def median_baseline(token_level_rewards, response_mask, index, config=None, **kwargs):
            scores = token_level_rewards.sum(-1)
            groups = {uid: scores[torch.from_numpy(index == uid)].median() for uid in set(index)}
            values = (scores - torch.stack([groups[uid] for uid in index])).unsqueeze(-1) * response_mask
            return values, values

        check_estimator("test_median_baseline", algorithm("test_median_baseline"))

    def test_one_that_counts_padding_is_refused_with_what_to_do(self):
        @register_adv_est("test_batch_mean")
        def batch_mean(token_level_rewards, response_mask, index, config=None, **kwargs):
            scores = token_level_rewards.sum(-1)
            values = (scores - scores.mean()).unsqueeze(-1) * response_mask
            return values, values

        with pytest.raises(ValueError, match="padding changes its advantages of other rows"):
            check_estimator("test_batch_mean", algorithm("test_batch_mean"))

    def test_one_that_nobody_registered_is_named_with_the_way_to_do_it(self):
        with pytest.raises(ValueError, match="my_own.*VERL_USE_EXTERNAL_MODULES must register it"):
            check_estimator("my_own", algorithm("my_own"))
