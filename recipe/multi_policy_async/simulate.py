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
"""Simulates a job's data path on a virtual clock: no deadlock, nothing lost, and which resource to add.

    python -m recipe.multi_policy_async.simulate --config-name three_paces
    python -m recipe.multi_policy_async.simulate --config-name planner_solver --compare   # asynchronous or not
    python -m recipe.multi_policy_async.simulate --config-name planner_solver --what-if   # more of each resource

Exit codes: 0, 1 the parts deadlocked or the audit found a fault, 2 the scenario cannot be run as configured.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .configuration.errors import ConfigError
from .simulator.compare import compare_modes, what_if
from .simulator.job import SimulationStalled, simulate
from .simulator.report import as_dict, audit_lines, format_run
from .simulator.scenario import Scenario, compose_scenario
from .workflow_driver import DriverError

EXIT_FAILED, EXIT_CONFIG = 1, 2
_ROUNDS = 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--config-name", "-cn", default="three_paces", help="scenario to start from")
    parser.add_argument("--config-dir", "-cd", type=Path, help="folder of your own scenarios")
    parser.add_argument("--compare", action="store_true", help="asynchronous against synchronous training, in turn")
    parser.add_argument("--what-if", action="store_true", help="again with more of each resource in turn")
    parser.add_argument("--json", type=Path, help="write the numbers of the run to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line describes; returns the exit code."""
    arguments = parse(argv)
    # Retried requests and the openai client's own log lines are part of normal operation here.
    logging.basicConfig(level=logging.WARNING)

    def compose(more: Sequence[str]) -> Scenario:
        return compose_scenario(arguments.config_name, [*arguments.overrides, *more], arguments.config_dir)

    try:
        scenario = compose([])
        if arguments.compare:
            text, by_mode = compare_modes(compose, _ROUNDS)
            runs = [run for runs in by_mode.values() for run in runs]
            text = "\n\n".join([text, *(audit_lines(run) for run in runs if run.faults)])
        else:
            runs = [simulate(scenario)]
            text = format_run(runs[0])
        print(text)
        if arguments.what_if:
            print(f"\n{what_if(compose, runs[0])}")
        if arguments.json:
            arguments.json.write_text(json.dumps([as_dict(run) for run in runs], indent=2) + "\n")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (SimulationStalled, DriverError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FAILED if any(run.faults for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
