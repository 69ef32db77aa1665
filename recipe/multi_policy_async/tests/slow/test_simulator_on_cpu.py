"""The simulator, and with it the whole data path under different paces. Virtual time: nothing here waits."""

import asyncio
import json

import pytest

from ... import simulate as command
from ...configuration.errors import ConfigError
from ...simulator import virtual_time
from ...simulator.compare import compare_modes
from ...simulator.job import SimulationStalled, simulate
from ...simulator.measured import SERVING, TRAINING, WORKFLOWS, Run
from ...simulator.report import format_run
from ...simulator.scenario import compose_scenario

pytestmark = pytest.mark.slow

# Few calls, since each costs milliseconds of the real CPU: slow servers, small groups. Simulated seconds cost nothing.
SMALL = ["workflow.n=2", "workflow.max_concurrent=8", "simulation.warmup_s=10", "simulation.seconds=40"]
SLOW = [*SMALL, "policy_defaults.serving.token_s=0.2"]


def _run(name: str, *overrides: str) -> Run:
    return simulate(compose_scenario(name, list(overrides)))


class TestVirtualTime:
    def test_waits_end_in_their_order_without_waiting(self):
        async def main():
            loop, ended = asyncio.get_running_loop(), []

            async def wait(seconds):
                await asyncio.sleep(seconds)
                ended.append((seconds, round(loop.time(), 3)))

            await asyncio.gather(wait(3600), wait(0.5), wait(60))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 5)
            return ended, round(loop.time(), 3)

        assert virtual_time.run(main()) == ([(0.5, 0.5), (60, 60.0), (3600, 3600.0)], 3605.0)

    def test_work_for_a_thread_is_done_in_its_place_and_its_errors_arrive(self):
        async def main():
            assert await asyncio.to_thread(len, "four") == 4
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(divmod, 1, 0)
            return asyncio.get_running_loop().time()

        assert virtual_time.run(main()) < 0.001

    def test_a_program_that_can_never_go_on_is_told(self):
        async def main():
            await asyncio.Event().wait()

        with pytest.raises(virtual_time.Deadlock):
            virtual_time.run(main())


class TestScenario:
    def test_the_lead_is_derived_as_in_a_job(self):
        policies = compose_scenario("three_paces", ["policies.solver.training.staleness_threshold=2"]).policies
        assert policies["solver"].queue.max_lead_groups == 4 * 1 * (1 + 2)
        assert policies["verifier"].queue.max_lead_groups == 2 * 1 * (1 + 1)

    def test_every_problem_is_named_at_once(self):
        wrong = ["simulation.second=9", "policies.solver.serving.replicas=0", "ingest.schedule=never", "polices=1"]
        with pytest.raises(ConfigError) as caught:
            compose_scenario("three_paces", wrong)
        keys = {problem.key for problem in caught.value.problems}
        assert keys == {"simulation.second", "policies.solver.serving.replicas", "ingest.schedule", "polices"}

    def test_a_scenario_of_ones_own_starts_from_the_base(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("defaults: [simulation, _self_]\npolicies: {one: {}}\n")
        assert list(compose_scenario("mine", [], tmp_path).policies) == ["one"]


class TestThreePaces:
    """Three policies called 1, 4 and 0.2 times per workflow, with speeds that differ by ten."""

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Run:
        slow = ["policies.planner.serving.token_s=0.05", "policies.solver.serving.token_s=0.2"]
        slow += ["policies.verifier.serving.token_s=0.5", "policies.planner.training.row_s=16"]
        slow += ["policies.solver.serving.slots_per_replica=4", "simulation.warmup_s=150", "simulation.seconds=400"]
        return _run("three_paces", *SMALL, *slow)

    def test_nothing_is_lost_and_staleness_keeps_its_bounds(self, run):
        """Invariants 1, 2, 3, 5, 6, by id and token by token."""
        assert run.faults == ()
        assert run.rows == sum(run.fates.values()) > 0
        assert not any(fate is None for _, fate in run.fates)
        bounds = {name: policy.queue.max_staleness for name, policy in run.scenario.policies.items()}
        assert all(run.policies[name].staleness_max <= bound for name, bound in bounds.items())

    def test_each_policy_is_bound_by_what_was_made_scarce_for_it(self, run):
        assert run.policies["planner"].bound_by == TRAINING
        assert run.policies["solver"].bound_by == SERVING
        assert run.policies["verifier"].bound_by == WORKFLOWS

    def test_the_slow_trainer_never_waits(self, run):
        assert run.policies["planner"].busy > 0.99

    def test_the_report_says_which_resource_to_add(self, run):
        text = format_run(run)
        assert "planner: its trainer is busy 100% of the time: more policies.planner.training.ranks" in text
        assert "more policies.solver.serving.replicas" in text


def test_two_runs_with_one_seed_are_the_same():
    first, second = (_run("planner_solver", *SLOW) for _ in range(2))
    assert first.policies == second.policies and first.fates == second.fates and first.rows > 0


def test_a_policy_that_holds_loses_no_group_to_staleness_while_its_lead_fits_its_bound():
    """Tasks of very different length; the same policies without holding lose the long ones."""
    uneven = [*SLOW, "policy_defaults.serving.response_spread=0.95", "policy_defaults.training.batch_groups=2"]
    uneven += ["queue.max_staleness=1", "simulation.seconds=180"]
    dropping, holding = (_run("planner_solver", *uneven, f"queue.on_stale={rule}") for rule in ("drop", "hold"))
    for name in ("planner", "solver"):
        assert dropping.fates.get((name, "stale"), 0) > 0
        assert holding.fates.get((name, "stale"), 0) == 0
        assert holding.policies[name].phases["hold"] > 0


def test_failed_workflows_and_groups_that_stay_small_are_counted_not_lost():
    rules = ["simulation.fail_share=0.3", "policies.solver.calls_per_workflow=0.5"]
    run = _run("planner_solver", *SLOW, *rules, "policies.solver.optional_by=workflow")
    assert run.faults == ()
    assert run.fates["planner", "failed_workflow"] > 0
    assert run.fates["solver", "group_too_small"] > 0


def test_replay_is_no_fault_and_workflows_that_call_nobody_have_not_failed():
    """One policy that is called by a task in twenty; its small batches are filled up with trained groups."""
    seldom = ["policies.solver=null", "policies.planner.calls_per_workflow=0.05", "simulation.other_s=1"]
    replay = ["min_batch_groups=1", "coalesce_s=2", "replay.max_uses=3", "replay.max_age=8"]
    run = _run("planner_solver", *SMALL, *seldom, *(f"policies.planner.queue.{each}" for each in replay))
    assert run.faults == () and run.policies["planner"].trained_rate > 0


def test_parts_that_wait_for_each_other_are_told_with_their_states():
    """A version of 8 groups with a lead of 2, which a job refuses (training_checks): the simulator shows why."""
    stuck = ["policy_defaults.training.batch_groups=8", "queue.max_lead_groups=2"]
    with pytest.raises(SimulationStalled, match="waiting for training.*groups in lead: planner 2.0 of 2"):
        _run("planner_solver", *SLOW, *stuck, "simulation.seconds=300")


@pytest.mark.parametrize("schedule", ["sync", "alternate"])
def test_where_stages_take_turns_the_advice_is_the_busiest_stage(schedule):
    """A longer lead changes nothing there: rounds have a size of their own, a turn ends after its versions."""
    run = _run("planner_solver", *SMALL, "workflow.max_concurrent=16", f"ingest.schedule={schedule}")
    text = format_run(run)
    assert f"the busiest is {run.busiest[0]}" in text and "staleness_threshold" not in text


def test_asynchronous_training_is_compared_with_rounds_on_the_same_resources():
    text, runs = compare_modes(
        lambda more: compose_scenario("planner_solver", [*SLOW, "simulation.seconds=60", *more]), rounds=1
    )
    fast, slow = runs["asynchronous"][0], runs["synchronous"][0]
    assert fast.workflow_rate > slow.workflow_rate > 0
    assert max(policy.staleness_max for policy in slow.policies.values()) == 0
    assert "speed-up" in text


def test_the_command_prints_the_table_and_writes_the_numbers(tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = ["--config-name", "planner_solver", "--json", str(file), *SLOW]
    assert command.main(arguments) == 0
    assert "which resource to add" in capsys.readouterr().out
    (numbers,) = json.loads(file.read_text())
    assert numbers["faults"] == [] and set(numbers["policies"]) == {"planner", "solver"}


def test_a_scenario_that_cannot_be_run_exits_with_2(capsys):
    assert command.main(["simulation.seconds=-1"]) == 2
    assert "simulation.seconds" in capsys.readouterr().err
