#!/usr/bin/env bash
# The example on a runner with eight GPUs, as short as it says something: SGLang, nccl, two small Qwen models, a few weight
# versions of both policies; PASS and exit status 0 only if each policy reached them.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export DEVICE=gpu MODEL_KIND=qwen UPDATES=${UPDATES:-3} GROUP_SIZE=${GROUP_SIZE:-4}
export PLANNER_MODEL=${PLANNER_MODEL:-Qwen/Qwen3-0.6B} SOLVER_MODEL=${SOLVER_MODEL:-Qwen/Qwen3-0.6B}
exec bash "$ROOT/examples/multi_policy/run_qwen_planner_solver.sh" \
  workflow.max_concurrent=64 "$@"
