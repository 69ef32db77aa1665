#!/usr/bin/env bash
# Everything that a change must pass: lint, unit tests, then a short co-training run. Installs what it needs.
#
#   bash tests/run_tests.sh          all of it: unit tests, fuzz, tests that start Ray, agent frameworks, co-training runs with
#                                    and without faults
#   E2E=0 bash tests/run_tests.sh    without the agent frameworks and the training runs

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/setup_env.sh"
setup_env cpu dev
cd "$ROOT"
TESTS=recipe/multi_policy_async/tests

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# In the ignored folders all tests are slow: not even to be imported here, once per worker.
"$PYTHON" -m pytest -q -n 2 --dist loadfile -m "not e2e and not ray and not slow and not fuzz" $TESTS tests/benchmarks \
  --ignore $TESTS/slow --ignore $TESTS/with_ray --ignore $TESTS/with_torch
"$PYTHON" -m pytest -q -n 2 --dist loadfile -m slow $TESTS
FUZZ_EXAMPLES=20 "$PYTHON" -m pytest -q -m fuzz $TESTS
"$PYTHON" -m pytest -q -m "ray and not e2e" $TESTS
if [ "${E2E:-1}" != 0 ]; then
  "$PYTHON" -m pytest -q -m frameworks tests/special_e2e
  "$PYTHON" -m pytest -q -m e2e tests/special_e2e
fi
