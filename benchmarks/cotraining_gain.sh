#!/usr/bin/env bash
# Does co-training gain over training one policy alone? Runs the example three times, with both policies in training,
# with the planner frozen, with the solver frozen, prints the three reward curves and draws them.
# PASS: both gained at least MIN_GAIN, and at least MIN_LEAD more than either frozen run.
#
#   bash benchmarks/cotraining_gain.sh [Hydra overrides]

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# ---------------------------------------------------------------- knobs
OUT=${OUT:-$ROOT/outputs/cotraining_gain-$(date +%Y%m%d-%H%M%S)}
MIN_GAIN=${MIN_GAIN:-0.3}
MIN_LEAD=${MIN_LEAD:-0.1}
export DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
export UPDATES=${UPDATES:-30}
# MODEL_KIND, SEED, LR, ... are those of examples/multi_policy/run_qwen_planner_solver.sh.

# ---------------------------------------------------------------- three runs
mkdir -p "$OUT"
train() { # name, Hydra overrides
  echo "=== $1"
  RUN_DIR="$OUT/$1" bash "$ROOT/examples/multi_policy/run_qwen_planner_solver.sh" "${@:2}"
}
train both "$@"
train planner_frozen "$@" multi_model.models.planner_model.train=false
train solver_frozen "$@" multi_model.models.solver_model.train=false

# ---------------------------------------------------------------- curves
source "$ROOT/scripts/setup_env.sh"
setup_env "$DEVICE" dev # matplotlib
cd "$ROOT"
"$PYTHON" -m recipe.multi_policy_async.assets.plot_curves \
  both="$OUT/both" planner_frozen="$OUT/planner_frozen" solver_frozen="$OUT/solver_frozen" \
  --png "$OUT/cotraining_gain.png" --min-gain "$MIN_GAIN" --min-lead "$MIN_LEAD" | tee "$OUT/cotraining_gain.txt"
echo PASS
