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
"""Co-training with a verifier that is asked about every fifth task: it trains too, and keeps nobody waiting."""

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

UPDATES = 3
POLICIES = ("planner_model", "solver_model", "verifier_model")


@pytest.fixture
def verifier(assets) -> Path:
    """The third model, beside those that all other tests use."""
    out = assets / "tiny_verifier"
    prepare = [sys.executable, "-m", "recipe.multi_policy_async.assets.prepare_models", "--kind", "tiny"]
    subprocess.run([*prepare, "--roles", "verifier", "--out", str(out)], check=True)
    return out / "verifier"


@pytest.mark.e2e
def test_a_rarely_called_third_policy_trains_on_what_there_is(start_job, verifier):
    path = f"multi_model.models.verifier_model.model_path={verifier}"
    job = start_job(f"stop.updates={UPDATES}", path, config="three_policies_tiny")
    assert job.wait(timeout_s=600) == 0, "\n".join(job.lines[-20:])

    steps = [json.loads(line) for line in (job.run_dir / "metrics/steps.jsonl").read_text().splitlines()]
    rows_of = {model_id: [step["rows"] for step in steps if step["model_id"] == model_id] for model_id in POLICIES}
    assert all(max(step["version"] for step in steps if step["model_id"] == m) >= UPDATES for m in POLICIES)
    assert min(rows_of["verifier_model"]) < min(rows_of["planner_model"]), "it trains on a smaller batch"
    with sqlite3.connect(job.run_dir / "ledger.sqlite") as ledger:
        sampled = Counter(model_id for (model_id,) in ledger.execute("SELECT model_id FROM rows"))
    assert sampled["verifier_model"] < sampled["planner_model"] / 2, "it is called rarely"
