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
"""Ten simulated minutes of three policies with very different paces: half a minute of one core, no Ray, no torch."""

import pytest

from recipe.multi_policy_async.simulator.job import simulate
from recipe.multi_policy_async.simulator.measured import SERVING, TRAINING, WORKFLOWS
from recipe.multi_policy_async.simulator.scenario import compose_scenario

pytestmark = pytest.mark.e2e


def test_no_policy_of_three_paces_is_slower_than_it_must_be_and_nothing_is_lost():
    scenario = compose_scenario("three_paces", [])
    run = simulate(scenario)  # a deadlock raises
    assert scenario.simulation.seconds == 600
    assert run.faults == ()
    assert sum(run.fates.values()) == run.rows > 5000
    for name, policy in run.policies.items():
        assert policy.attained >= 0.9, name
        assert policy.staleness_max <= scenario.policies[name].queue.max_staleness, name
    assert {name: policy.bound_by for name, policy in run.policies.items()} == {
        "planner": TRAINING,
        "solver": SERVING,
        "verifier": WORKFLOWS,
    }
    assert run.workflow_rate >= 0.9 * min(run.workflow_bounds.values())
