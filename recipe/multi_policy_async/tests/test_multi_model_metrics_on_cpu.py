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
"""What people see of a running job."""

import io

import pytest

from ..multi_model_metrics import JobMetrics
from .fakes.workflow_records import PLANNER

WORKFLOWS = {"running": 3, "blocked": 0, "finished": 7, "failed": 1, "score_mean": 0.5}


@pytest.mark.parametrize(("state", "shown"), [("waiting for training", True), ("producing", False)])
def test_the_pipeline_line_tells_what_production_waits_for(tmp_path, state, shown):
    console = io.StringIO()
    model = {"running": 2, "queue_groups": 4, "state": "open"}
    JobMetrics(tmp_path, [PLANNER], out=console).pipeline({**WORKFLOWS, "state": state}, {PLANNER: model})
    assert "3 running, 7 finished, 1 failed, score 0.500" in console.getvalue()
    assert (f"score 0.500, {state} | {PLANNER}" in console.getvalue()) is shown
