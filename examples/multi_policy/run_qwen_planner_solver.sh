#!/usr/bin/env bash
# Co-trains a planner and a solver. The planner sees the question, the solver sees only the planner's message; both
# learn from whether the final answer is right. Installs what it needs, prepares models and tasks, trains, ends in PASS.
#
# With an NVIDIA GPU: two Qwen models from the hub on GSM8K, SGLang and nccl, eight GPUs as 2 + 2 and 2 + 2.
# Without: two tiny models, or SmolLM2-135M, on reasoning-gym's chain_sum; the same path on a CPU backend.
#
#   bash examples/multi_policy/run_qwen_planner_solver.sh
#   UPDATES=30 MODEL_KIND=tiny bash examples/multi_policy/run_qwen_planner_solver.sh gateway.upstream=verl_client
#
# Arguments are passed on as Hydra overrides, after what the knobs below decide.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# ---------------------------------------------------------------- knobs
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
if [ "$DEVICE" = gpu ]; then MODEL_KIND=${MODEL_KIND:-qwen}; else MODEL_KIND=${MODEL_KIND:-tiny}; fi # tiny | smollm2 | qwen

VERIFIER=${VERIFIER:-0} # 1, with tiny models: a third policy, asked about every fifth task

ASSETS_DIR=${ASSETS_DIR:-$ROOT/.cache/assets} # models and tasks, kept between runs
RUN_DIR=${RUN_DIR:-$ROOT/outputs/planner_solver_$MODEL_KIND-$(date +%Y%m%d-%H%M%S)}
SEED=${SEED:-0} # of models and tasks

# Left empty, the composition decides (recipe/multi_policy_async/config/).
UPDATES=${UPDATES:-}                           # weight versions of each policy
PLANNER_MODEL=${PLANNER_MODEL:-}               # a folder, or a hub id on a machine with GPUs
SOLVER_MODEL=${SOLVER_MODEL:-}                 #
N_GPUS_TRAINER=${N_GPUS_TRAINER:-}             # per policy; logical ones on a CPU
N_GPUS_ROLLOUT=${N_GPUS_ROLLOUT:-}             # per policy, all replicas together
TENSOR_PARALLEL=${TENSOR_PARALLEL:-}           # GPUs of one replica
GROUP_SIZE=${GROUP_SIZE:-}                     # attempts per task
LR=${LR:-}
TASK=${TASK:-chain_sum}                        # a dataset of reasoning-gym, and its settings
TASK_SETTINGS=${TASK_SETTINGS:-}               # "min_terms=2 max_terms=2"; left empty: the setting of MODEL_KIND

# ---------------------------------------------------------------- environment
export MODEL_KIND ASSETS_DIR
source "$ROOT/scripts/setup_env.sh"
setup_env "$DEVICE"
cd "$ROOT"

# ---------------------------------------------------------------- models and tasks
prepare() { "$PYTHON" -m "recipe.multi_policy_async.assets.prepare_$1" "${@:2}"; }

prepare_tasks() { # settings of the dataset, then arguments of prepare_tasks
  local word words=()
  for word in ${TASK_SETTINGS:-$1}; do words+=(--setting "$word"); done
  prepare tasks --dataset "$TASK" "${words[@]}" --seed "$SEED" "${@:2}"
}

# The tasks that the tiny models were warm-started on.
TINY_SETTINGS='from recipe.multi_policy_async.assets.prepare_models import TINY
print(*(f"{name}={str(value).lower()}" for name, value in TINY.tasks.items()))'

config=planner_solver_$MODEL_KIND
roles=(planner solver)
if [ "$VERIFIER" = 1 ]; then
  [ "$MODEL_KIND" = tiny ] || { echo "VERIFIER=1: for MODEL_KIND=tiny only" >&2 && exit 2; }
  config=three_policies_tiny
  roles+=(verifier)
fi

case $MODEL_KIND in
  tiny)
    prepare models --kind tiny --out "$ASSETS_DIR/tiny" --seed "$SEED" --roles "${roles[@]}"
    prepare_tasks "$("$PYTHON" -c "$TINY_SETTINGS")" --out "$ASSETS_DIR/tiny_tasks"
    ;;
  smollm2)
    prepare models --kind smollm2 --out "$ASSETS_DIR/smollm2"
    prepare_tasks "min_terms=2 max_terms=2 min_digits=1 max_digits=1" --train-size 64 --val-size 16 --out "$ASSETS_DIR/smollm2_tasks"
    ;;
  qwen)
    [ -f "$ASSETS_DIR/gsm8k/train.parquet" ] || "$PYTHON" examples/multi_policy/prepare_gsm8k.py --out "$ASSETS_DIR/gsm8k"
    ;;
  *)
    echo "MODEL_KIND=$MODEL_KIND: tiny, smollm2 or qwen" >&2
    exit 2
    ;;
esac

# ---------------------------------------------------------------- training
overrides=(device="$DEVICE" run.dir="$RUN_DIR")
[ -z "$UPDATES" ] || overrides+=(stop.updates="$UPDATES")
[ -z "$PLANNER_MODEL" ] || overrides+=(multi_model.models.planner_model.model_path="$PLANNER_MODEL")
[ -z "$SOLVER_MODEL" ] || overrides+=(multi_model.models.solver_model.model_path="$SOLVER_MODEL")
[ -z "$N_GPUS_TRAINER" ] || overrides+=(policy_defaults.trainer.n_gpus="$N_GPUS_TRAINER")
[ -z "$N_GPUS_ROLLOUT" ] || overrides+=(policy_defaults.rollout.n_gpus="$N_GPUS_ROLLOUT")
[ -z "$TENSOR_PARALLEL" ] || overrides+=(policy_defaults.actor_rollout_ref.rollout.tensor_model_parallel_size="$TENSOR_PARALLEL")
[ -z "$GROUP_SIZE" ] || overrides+=(workflow.n="$GROUP_SIZE")
[ -z "$LR" ] || overrides+=(policy_defaults.actor_rollout_ref.actor.optim.lr="$LR")

if [ "$DEVICE" = gpu ] && ! "$PYTHON" -c 'import flash_attn' 2>/dev/null; then
  echo "flash-attn is not installed: training with torch's attention on padded rows, which is slower (docs/gpu.md)"
  overrides+=(policy_defaults.actor_rollout_ref.model.use_remove_padding=false)
  overrides+=(policy_defaults.actor_rollout_ref.model.override_config.attn_implementation=sdpa)
fi

"$PYTHON" -m recipe.multi_policy_async.main_multi_policy \
  --config-name "$config" "${overrides[@]}" "$@"

# ---------------------------------------------------------------- verdict
"$PYTHON" -m recipe.multi_policy_async.run_summary "$RUN_DIR"
echo "PASS  $RUN_DIR"
