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
"""Entry point: compose and check the job, start Ray, hand over.

    python -m recipe.multi_policy_async.main_multi_policy --config-name planner_solver_tiny stop.updates=30

Exit codes: 0 every trained policy reached what ``stop.by`` asks, 1 the job failed, 2 it cannot be run as configured,
130 ended by a signal.
"""

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from .configuration.compose import DEFAULT_CONFIG, compose_job
from .configuration.errors import ConfigError
from .configuration.explain import explain
from .configuration.resources import ResourcesError, check
from .configuration.schema import JobSpec
from .resume import Plan, describe, plan_resume
from .run_directory import claim, goes_on, write_config

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="main_multi_policy", description="Co-train several policies on verl.")
    parser.add_argument("--config-name", "-cn", default=DEFAULT_CONFIG, help="composition to start from")
    parser.add_argument("--config-dir", "-cd", type=Path, help="folder of your own compositions")
    parser.add_argument("--explain", action="store_true", help="say what the job would do, start nothing")
    parser.add_argument("--resolved", action="store_true", help="with --explain: every model's whole verl config too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    signals = StartSignals()
    try:
        job = compose_job(arguments.config_name, arguments.overrides, arguments.config_dir)
        if arguments.explain:
            print(explain(job, arguments.resolved))
            if goes_on(job):
                print("\n" + "\n".join(["resumption", *(f"  {line}" for line in describe(plan_resume(job)))]))
            return 0
        return launch(job, signals)
    except (ConfigError, ResourcesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # while it starts, Ray exits on SIGTERM by itself, with the signal's number
        return EXIT_INTERRUPTED if stop.code == signal.SIGTERM else EXIT_FAILED


class StartSignals:
    """SIGINT and SIGTERM until the job has handlers of its own: both interrupt, so that Ray is shut down.

    One is remembered: what Ray runs while it starts may swallow the exception.
    """

    def __init__(self):
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        self._came = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Interrupt now if a signal came before."""
        if self._came:
            raise KeyboardInterrupt


def launch(job: JobSpec, signals: StartSignals) -> int:
    """Start or join Ray, check that the job fits, run it, leave nothing behind.

    The run directory is claimed once the job is known to fit: a corrected command may name the same one.

    Raises:
        ResourcesError: the cluster is too small.
        ConfigError: the run directory belongs to another run, or its run cannot be gone on with.
        KeyboardInterrupt: a signal came.
    """
    with ExitStack() as held:
        restore: Plan = {}
        if resumes := goes_on(job):  # before Ray, which takes seconds
            held.enter_context(claim(job))
            restore = plan_resume(job)
        from .configuration.ray_cluster import available_nodes, connected  # here: a refused job needs no Ray

        with connected(job):
            signals.check()
            check(job, available_nodes())
            if not resumes:
                held.enter_context(claim(job))
            write_config(job)
            from .multi_model_disaggregate_trainer import run

            return run(job, restore)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
