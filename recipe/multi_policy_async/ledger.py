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
"""Looks into a job's ledger, also while the job runs.

python -m recipe.multi_policy_async.ledger RUN_DIR                         # counts per policy and reason
python -m recipe.multi_policy_async.ledger RUN_DIR workflow e0-t3-s1-a0    # one workflow's life, as JSON
python -m recipe.multi_policy_async.ledger RUN_DIR export rows.parquet     # rows with their tokens
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ingest import ledger_report as report

LEDGER_FILE = "ledger.sqlite"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.multi_policy_async.ledger", description=__doc__.split("\n")[0]
    )
    parser.add_argument("where", type=Path, help="a run directory, or the ledger file")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("counts", help="rows per policy and fate, workflows, checkpoints (default)")
    commands.add_parser("workflow", help="one workflow's life, as JSON").add_argument("workflow_id")
    commands.add_parser("export", help="rows with their tokens, as parquet").add_argument("parquet", type=Path)
    options = parser.parse_args(arguments)
    path = options.where / LEDGER_FILE if options.where.is_dir() else options.where
    try:
        with report.open_ledger(path) as db:
            if options.command == "workflow":
                print(json.dumps(report.workflow_life(db, options.workflow_id), indent=2))
            elif options.command == "export":
                print(f"{report.export_parquet(db, options.parquet)} rows written to {options.parquet}")
            else:
                _print_counts(db)
    except (ValueError, OSError, sqlite3.DatabaseError) as error:  # a mistake, a disk, a damaged file
        print(f"ledger: {error}", file=sys.stderr)
        return 2
    return 0


def _print_counts(db: sqlite3.Connection) -> None:
    tables = {
        "Rows": report.row_counts(db),
        "Stale, by turns of the agent in its workflow": report.stale_by_turns(db),
        "Trained again (replay)": report.replay_counts(db),
        "Abandoned before they were rows": report.abandoned_tokens(db),
        "Workflows": report.workflow_counts(db),
        "Checkpoints": report.checkpoints(db),
    }
    for title, records in tables.items():
        _print_table(title, records)
    if not any(tables.values()):
        print("nothing is in the ledger yet: no workflow was started")


def _print_table(title: str, records: list[dict[str, Any]]) -> None:
    if not records:
        return
    lines = [list(records[0]), *([str(value) for value in record.values()] for record in records)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = [isinstance(value, int | float) for value in records[0].values()]
    print(title)
    for line in lines:
        cells = (
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True)
        )
        print("  " + "  ".join(cells).rstrip())
    print()


if __name__ == "__main__":
    sys.exit(main())
