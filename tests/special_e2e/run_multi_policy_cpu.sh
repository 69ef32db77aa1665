#!/usr/bin/env bash
# The example on a CPU, as short as it says something: every part real, a few weight versions of both policies.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export DEVICE=cpu MODEL_KIND=tiny UPDATES=${UPDATES:-4}
exec bash "$ROOT/examples/multi_policy/run_qwen_planner_solver.sh" "$@"
