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
"""A policy that takes images is trained by verl's own engine on rows that show images."""

import json
import sqlite3

import pandas as pd
import pytest

from recipe.multi_policy_async.tests.tiny_qwen_vl import save_tiny_vl

pytestmark = pytest.mark.e2e

LOG_PROB_TOLERANCE = 1e-3
UPDATES = 3


@pytest.fixture(scope="module")
def runs():
    return []


@pytest.fixture
def run_dir(start_job, runs, tmp_path_factory):
    """Of one job, for all tests.

    On policy, so that the trainer's own log-probs must be those of the servers; weights are checked by checksum.
    """
    if runs:
        return runs[0]
    folder = tmp_path_factory.mktemp("vl_job")
    save_tiny_vl(folder / "model")
    rows = [
        {
            "data_source": "pictures",
            "prompt": [{"role": "user", "content": f"picture {i}"}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"question": f"picture {i}", "index": i},
        }
        for i in range(16)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    job = start_job(
        f"multi_model.models.shared_model.model_path={folder / 'model'}",
        "~agent_model_mapping",
        "+agent_model_mapping={agent: shared_model}",
        "workflow.name=recipe.multi_policy_async.tests.fakes.picture_workflow.Pictures",
        "workflow.n=4",
        f"data.train_files={folder / 'train.parquet'}",
        "data.val_files=null",
        "validation.before_training=false",
        "validation.at_end=false",
        "gateway.rows=merged",
        f"stop.updates={UPDATES}",
        "policy_defaults.data.max_prompt_length=192",
        "policy_defaults.data.max_response_length=128",
        "policy_defaults.actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "policy_defaults.async_training.staleness_threshold=0",
        "policy_defaults.algorithm.rollout_correction.bypass_mode=false",
        "policy_defaults.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.checksum=true",
        config="single_policy_tiny",
    )
    assert job.wait(timeout_s=300) == 0, "\n".join(job.lines[-20:])
    runs.append(job.run_dir)
    return job.run_dir


def test_the_servers_log_probs_agree_with_the_trainers(run_dir):
    lines = (run_dir / "metrics" / "shared_model.jsonl").read_text().splitlines()
    name = "shared_model/training/rollout_probs_diff_max"
    differences = [data[name] for data in (json.loads(line)["data"] for line in lines) if name in data]
    assert len(differences) == UPDATES
    assert max(differences) < LOG_PROB_TOLERANCE


def test_rows_with_images_were_trained(run_dir):
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        [(shown,)] = ledger.execute(
            "SELECT count(DISTINCT row_id) FROM row_images JOIN rows ON id = row_id WHERE fate = 'trained'"
        )
        [(stored,)] = ledger.execute("SELECT count(*) FROM images")
        [(references,)] = ledger.execute("SELECT count(*) FROM row_images")
    ledger.close()
    assert shown > 0 and 0 < stored < references
