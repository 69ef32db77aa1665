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
"""Whether a job fits on a cluster is known before anything starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..configuration.resources import (
    ROLLOUT_CPUS_PER_RANK,
    TRAINER_CPUS_PER_RANK,
    Need,
    Node,
    ResourcesError,
    _fits,
    check,
    job_needs,
    local_ray_resources,
    total,
)
from .config_fixtures import PLANNER, SOLVER, tiny_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """planner: 4 trainer ranks on two nodes, 2 replicas of 2 GPUs; solver: frozen, 1 replica."""
    return tiny_job(
        tmp_path_factory.mktemp("job"),
        "run.gpus_per_node=2",
        f"{PLANNER}.trainer.n_gpus=4",
        f"{PLANNER}.rollout.n_gpus=4",
        f"{PLANNER}.actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"{SOLVER}.train=false",
    )


def test_every_part_asks_for_what_verl_puts_into_its_placement_groups(job):
    assert job_needs(job) == [
        *[Need("planner_model trainer", 2, 2 * TRAINER_CPUS_PER_RANK)] * 2,
        *[Need("planner_model rollout", 2, 2 * ROLLOUT_CPUS_PER_RANK)] * 2,
        Need("solver_model rollout", 1, ROLLOUT_CPUS_PER_RANK),
    ]


def test_a_job_that_fits_gives_the_table(job):
    shown = check(job, [Node("a", 8, 64), Node("b", 8, 64)])
    assert "planner_model trainer" in shown and "available" in shown


def test_too_few_gpus_are_refused_with_what_is_needed_and_what_is_there(job):
    with pytest.raises(ResourcesError, match=r"needs 9, the cluster has 4") as caught:
        check(job, [Node("a", 4, 64)])
    assert "solver_model rollout" in str(caught.value)


def test_too_few_cpus_are_refused(job):
    with pytest.raises(ResourcesError, match="too few CPUs"):
        check(job, [Node("a", 16, 4)])


def test_enough_gpus_on_too_many_nodes_are_refused_since_verl_would_wait_for_ever(job):
    with pytest.raises(ResourcesError, match="fit on the nodes"):
        check(job, [Node(str(i), 1, 64) for i in range(9)])


def test_a_packing_that_largest_first_misses_is_found():
    needs = [Need("p", gpus, 0) for gpus in (4, 3, 3, 2, 2, 2)]
    assert _fits(needs, [Node("a", 8, 0), Node("b", 8, 0)])


@given(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_that_were_cut_out_of_nodes_always_fit_back(shares):
    nodes = [Node(str(i), sum(own), 0) for i, own in enumerate(shares)]
    assert _fits([Need("p", gpus, 0) for own in shares for gpus in own], nodes)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 4))
def test_what_is_said_to_fit_never_needs_more_than_all_nodes_have(needs, count):
    nodes = [Node(str(i), 4, 0) for i in range(count)]
    if _fits([Need("p", gpus, 0) for gpus in needs], nodes):
        assert sum(needs) <= 4 * count and max(needs) <= 4


def test_a_local_ray_on_a_cpu_machine_gets_the_logical_resources_of_the_job(job):
    gpus, cpus = total(job_needs(job))
    resources = local_ray_resources(job)
    assert resources["num_gpus"] == gpus
    assert resources["num_cpus"] >= cpus
    check(job, [Node("local", resources["num_gpus"], resources["num_cpus"])])
