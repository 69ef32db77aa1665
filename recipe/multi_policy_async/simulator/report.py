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
"""A simulation as text: utilisation per stage and policy, what bounds each of them, which resource to add."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .measured import ENOUGH, SERVING, SLOTS, TRAINING, Flow, PolicyRun, Run

MODES = ("asynchronous", "synchronous")


def format_run(run: Run) -> str:
    """Everything that one simulation tells."""
    return "\n\n".join([workflow_lines(run), policy_table(run), audit_lines(run), advice(run)])


def workflow_lines(run: Run) -> str:
    """The workflows: rate, what bounds it, slots, admission."""
    lines = [
        f"measured: {run.seconds:g} simulated seconds",
        f"workflows: {run.workflow_rate:.2f}/s, {run.slots_in_use:.1f} of {run.slots} slots in use; a task waited for "
        f"room in training for {run.admission_share:.0%} of the time",
    ]
    if bounds := run.workflow_bounds:
        lines.append(allowed(bounds))
    return "\n".join(lines)


def allowed(workflow_bounds: Mapping[str, float]) -> str:
    """Workflows per second that each stage would allow, the least first."""
    ordered = sorted(workflow_bounds.items(), key=lambda item: item[1])
    return "each stage alone would allow: " + ", ".join(f"{name} {rate:.2f}/s" for name, rate in ordered)


def policy_table(run: Flow) -> str:
    """One line per policy. Shares are of the measured time, ``of bound`` is what the trainer got of what it could."""
    head = (
        "policy|calls/wf|serving|queued calls|gate closed|queue|train|sync|hold|wait|rows/s|bound|of bound|bound by|"
        "stale mean/max|dropped rows"
    ).split("|")
    lines = [head]
    for name, policy in run.policies.items():
        calls = policy.call_rate / run.workflow_rate if run.workflow_rate else 0.0
        line = [name, f"{calls:.2f}", f"{policy.serving_busy:.0%}", f"{policy.serving_queue:.1f}"]
        line += [f"{policy.gate_closed:.0%}"]
        if policy.trained:
            line += [f"{policy.queue_groups:.1f}"]
            line += [f"{policy.phases[phase]:.0%}" for phase in ("train", "sync", "hold", "wait")]
            line += [f"{policy.trained_rate:.2f}", f"{min(policy.bounds.values()):.2f}", f"{policy.attained:.0%}"]
            line += [policy.bound_by, f"{policy.staleness_mean:.1f}/{policy.staleness_max:.0f}"]
        else:
            line += ["frozen", *[""] * 9]
        dropped = ", ".join(f"{count} {reason}" for reason, count in policy.dropped.items())
        lines.append([*line, dropped or "none"])
    return table(lines)


def bound_lines(fast: Flow, slow: Flow) -> list[str]:
    """What bounds an asynchronous and a synchronous run."""
    bound = [f"{name} by {policy.bound_by}" for name, policy in fast.trained.items()]
    bound.append(f"workflows by {fast.workflows_bound_by or 'the lead'}")
    stage, share = slow.busiest
    return [
        f"{MODES[0]}, bound are: {', '.join(bound)}",
        f"{MODES[1]}: the stages take turns, and the busiest is {stage}, {share:.0%} of the time",
    ]


def audit_lines(run: Run) -> str:
    """Where all rows of the run ended, and what the audit found wrong."""
    fates: Counter[str] = Counter()
    for (_, fate), count in run.fates.items():
        fates[fate or "waiting"] += count
    ends = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
    lines = [f"audit: {run.rows} rows were sampled; by the ledger {ends}; {len(run.faults)} faults"]
    return "\n".join([*lines, *(f"  {fault}" for fault in run.faults[:20])])


def advice(run: Run) -> str:
    """One line per policy, and one for the workflows where they are what bounds one."""
    lines = ["which resource to add"]
    for name, policy in run.trained.items():
        lines.append(f"  {name}: {_policy_advice(name, policy, run)}")
    if any(policy.bound_by not in (TRAINING, SERVING) for policy in run.trained.values()):
        lines.append(f"  workflows: {_workflow_advice(run)}")
    return "\n".join(lines)


def _policy_advice(name: str, policy: PolicyRun, run: Run) -> str:
    at, attained = f"policies.{name}", policy.attained >= ENOUGH
    stale = policy.dropped.get("stale", 0) / run.seconds
    if not attained and stale > (1 - ENOUGH) * policy.trainable_rate:
        return (
            f"{stale / policy.trainable_rate:.0%} of its rows became stale: fewer workflows in play "
            f"(workflow.max_concurrent), more groups per version ({at}.training.batch_groups), or a higher "
            f"{at}.queue.max_staleness"
        )
    if policy.bound_by == TRAINING and policy.phases["sync"] > policy.phases["train"]:
        steps = f"{at}.training.trigger_parameter_sync_step"
        return f"its weight syncs take {policy.phases['sync']:.0%} of the time: more batches per version, {steps}"
    if policy.bound_by == TRAINING:
        return f"its trainer is busy {policy.busy:.0%} of the time: more {at}.training.ranks"
    if policy.bound_by == SERVING:
        return (
            f"its servers are busy {policy.serving_busy / (1 - policy.gate_closed):.0%} of the time that their gate is "
            f"open, {policy.serving_queue:.0f} calls wait for them: more {at}.serving.replicas"
        )
    short = "" if attained else f" (of which it trains {policy.attained:.0%})"
    return f"it gets the rows that workflows call it for{short}: more workflows per second"


def _workflow_advice(run: Run) -> str:
    if not run.workflow_rate:
        return "none ended in the measured time"
    stage, schedule = run.workflows_bound_by, run.scenario.ingest.schedule
    if stage is None and schedule != "all":  # more lead would change nothing
        stage, share = run.busiest
        return (
            f"ingest.schedule={schedule} lets stages take turns; the busiest is {stage}, {share:.0%} of the time: "
            f"more {_resource(stage)}, or ingest.schedule=all"
        )
    if stage is None:
        return "no stage is busy, production stops at the policies' lead: more policies.*.training.staleness_threshold"
    if stage == SLOTS:
        return "all slots are in use and no server is full: a larger workflow.max_concurrent"
    return f"{stage} bounds them: more {_resource(stage)}"


def _resource(stage: str) -> str:
    kind, _, name = stage.partition(" of ")
    resource = {"serving": "serving.replicas", "training": "training.ranks"}[kind]
    return f"policies.{name}.{resource}"


def table(lines: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """Aligned columns, numbers to the right; the first line is the head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {*left, *(i for i in range(len(lines[0])) if any(line[i][:1].isalpha() for line in lines[1:]))}
    return "\n".join(
        "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in pairs).rstrip()
        for pairs in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
    )


def as_dict(run: Run) -> Mapping[str, object]:
    """The numbers, for files."""
    return {
        "workflow_rate": run.workflow_rate,
        "workflow_bounds": run.workflow_bounds,
        "slots_in_use": run.slots_in_use,
        "admission_share": run.admission_share,
        "rows": run.rows,
        "faults": list(run.faults),
        "policies": {
            name: {**vars(policy), "bounds": policy.bounds, "bound_by": policy.bound_by, "attained": policy.attained}
            for name, policy in run.policies.items()
        },
    }
