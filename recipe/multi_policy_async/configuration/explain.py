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
"""What a job would do, as text and as files, without starting anything.

``python -m recipe.multi_policy_async.configuration.explain --config-name planner_solver_tiny [overrides]``
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from . import resources
from .overlay import get
from .schema import JobSpec, PolicySpec
from .training_checks import groups_per_version


def explain(job: JobSpec, resolved: bool = False) -> str:
    """Models, agents, resources, and where every setting that is not verl's default comes from.

    Args:
        job: the job.
        resolved: append every model's complete verl configuration.
    """
    sections = [
        f"job {job.run.name} on {job.device}, until {_goal(job)}\nrun directory {job.run.dir}",
        _block("models", [_model_line(policy) for policy in job.models.values()]),
        _block("agents", [f"{agent} -> {model}" for agent, model in job.agent_model_mapping.items()]),
        ("resources (logical)\n" if job.device == "cpu" else "resources\n") + resources.table(resources.job_needs(job)),
        _block("production", _production(job)),
        *([_block("notes", notes)] if (notes := _notes(job)) else []),
        _settings(job),
    ]
    if resolved:
        sections += [f"# {model}: resolved verl configuration\n{_yaml(p.verl)}" for model, p in job.models.items()]
    return "\n\n".join(sections)


def write_resolved(job: JobSpec) -> Path:
    """Write ``config/job.yaml``, one ``config/<model_id>.yaml`` per model and ``config/explain.txt`` into the run
    directory; returns the folder."""
    folder = job.run.dir / "config"
    folder.mkdir(parents=True, exist_ok=True)
    dumped = job.model_dump(mode="json")
    for model_id, policy in dumped["models"].items():
        (folder / f"{model_id}.yaml").write_text(_yaml(policy.pop("verl")))
        del policy["origin"]
    (folder / "job.yaml").write_text(_yaml(dumped))
    (folder / "explain.txt").write_text(explain(job) + "\n")
    return folder


def _production(job: JobSpec) -> list[str]:
    """Who decides whether another task is started, and what becomes of what is too much."""
    rule = {
        "any": "any policy that can train now is below its lead; one that is fed faster than it trains loses surplus",
        "all": "all policies that can train now are below their lead; production waits for the slowest",
    }
    lines = [
        f"schedule {job.ingest.schedule}, admission {job.ingest.admission}: a task is started while "
        f"{rule[job.ingest.admission]}"
    ]
    for policy in job.trained.values():
        queue = policy.queue
        most = queue.max_queue_groups or queue.max_lead_groups
        lines.append(f"{policy.model_id}: a lead of {queue.max_lead_groups} groups, of which {most} may be queued")
    return lines


def _notes(job: JobSpec) -> list[str]:
    """Settings that work, though hardly as meant."""
    notes = []
    for policy in job.trained.values():
        lead, bound = policy.queue.max_lead_groups, policy.queue.max_staleness
        versions = (lead - 1) // groups_per_version(policy.verl)
        if bound is not None and bound < versions:
            notes.append(
                f"{policy.model_id}: a lead of {lead} groups lets one wait {versions} versions, and "
                f"max_staleness={bound} drops those that do: lower staleness_threshold or max_lead_groups"
            )
    return notes


def _goal(job: JobSpec) -> str:
    if job.stop.by == "updates":
        return f"{job.stop.updates} updates of every trained policy"
    return f"{job.stop.tasks} tasks" if job.stop.by == "tasks" else f"{job.stop.seconds:g} seconds have passed"


def _model_line(policy: PolicySpec) -> str:
    role = f"trained on {_count(policy.trainer_gpus, 'GPU')}" if policy.train else "frozen"
    replicas = f"{_count(policy.num_replicas, 'replica')} of {_count(policy.gpus_per_replica, 'GPU')}"
    return f"{policy.model_id}: {policy.model_path}, {role}, {replicas}, names start with {policy.namespace}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _settings(job: JobSpec) -> str:
    rows = {model_id: _rows(policy) for model_id, policy in job.models.items()}
    shared = set.intersection(*(set(own) for own in rows.values())) if len(rows) > 1 else set()
    blocks = [_columns("settings of all models that differ from verl's defaults", sorted(shared))] if shared else []
    for model_id, own in rows.items():
        blocks.append(_columns(f"settings of {model_id} that differ from verl's defaults", sorted(set(own) - shared)))
    return "\n\n".join(blocks)


def _rows(policy: PolicySpec) -> list[tuple[str, str, str]]:
    ours = {
        "model_path": policy.model_path,
        "train": policy.train,
        "trainer.n_gpus": policy.trainer_gpus,
        "rollout.n_gpus": policy.rollout_gpus,
    }
    return [(key, _short(ours.get(key, get(policy.verl, key))), layer) for key, layer in policy.origin.items()]


def _short(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _columns(title: str, rows: list[tuple[str, str, str]]) -> str:
    keys, values = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return _block(title, [f"{key:<{keys}}  {value:<{values}}  {layer}" for key, value, layer in rows])


def _block(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=120)


if __name__ == "__main__":
    from ..main_multi_policy import main

    sys.exit(main(["--explain", *sys.argv[1:]]))
