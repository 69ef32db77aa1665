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
"""The real gateway in a process of its own, with a file in the place of the ingestor.

    python -m recipe.multi_policy_async.tests.fakes.gateway_process '{"models": {...}, "records": FILE, ...}'

Prints its URL as one JSON line and ends when its standard input does.
"""

import json
import logging
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from ...gateway.collector import calm_collector
from ...gateway_binding_registry import ModelBinding, ModelState, ModelStatus
from ...multi_model_gateway_router import MultiModelGatewayRouter
from ...trajectory import Version, WorkflowRecord
from .child_process import run, until_parent_leaves

DEFAULTS = yaml.safe_load((Path(__file__).parents[2] / "config/gateway/default.yaml").read_text())


class FileSink:
    """Appends every terminal record to a file.

    Args:
        flush: write each one at once, so that it outlives the process.
    """

    def __init__(self, path: Path, *, flush: bool) -> None:
        self._file = open(path, "wb", buffering=2**20)
        self._flush = flush

    async def __call__(self, record: WorkflowRecord) -> dict[str, int]:
        pickle.dump(record, self._file)
        if self._flush:
            self._file.flush()
        return dict(Counter(row.model_id for row in record.trajectories))

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[WorkflowRecord]:
    """Records in the order they came."""
    records = []
    with open(path, "rb") as file:
        while True:
            try:
                records.append(pickle.load(file))
            except EOFError:
                return records


async def serve(config: dict[str, Any]) -> None:
    sink = FileSink(Path(config["records"]), flush=config["flush"])
    spec = DEFAULTS | {"control_key": config["control_key"]}
    router = MultiModelGatewayRouter(spec, config["agents"], list(config["bindings"]), sink)
    url = await router.start()
    for model_id, binding in config["bindings"].items():
        await router.bind(ModelBinding(model_id=model_id, **binding))
        await router.set_status(model_id, ModelStatus(ModelState.OPEN, Version(0, 1)))
    calm_collector()
    print(json.dumps({"url": url}), flush=True)
    await until_parent_leaves()
    await router.stop()
    sink.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    run(serve(json.loads(sys.argv[1])))
