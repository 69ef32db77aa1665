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
"""From a model's section to its ``PolicySpec``: layers, derived settings, resolution.

The layers of a model's verl tree, later ones win: verl's own ``fully_async_ppo_trainer``, the device overlay,
``policy_defaults``, the model's section, and last what follows from the job (names, ranks, folders, horizon).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..ingest.spec import QueueSpec
from .errors import Problem
from .overlay import LayeredTree, get
from .verl_tree import verl_defaults

RANKS_PER_MODEL = 1000
"""Replica ranks are dealt in blocks, since verl names servers and weight-sync sockets by rank alone (C7, C8)."""

PORTS_PER_MODEL = 50

DERIVED = "derived"

_COUNTS = (
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "async_training.trigger_parameter_sync_step",
    "async_training.require_batches",
)
_NUMBERS = (
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.top_k",
    "async_training.staleness_threshold",
)
_MAY_BE_NULL = ("actor_rollout_ref.rollout.max_model_len",)

SHORT_KEYS = ("model_path", "train", "trainer.n_gpus", "rollout.n_gpus")
"""Keys of a model's section that are ours; those of the queue stand in ``async_training``."""


@dataclass(frozen=True)
class JobContext:
    """What a policy's settings follow from."""

    job: dict[str, Any]  # the resolved job tree without the models
    device: str
    overlay: dict[str, Any]  # the device's verl overlay
    policy_defaults: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.job["run"]["dir"])

    @property
    def tag(self) -> str:
        """Six hex digits that tell two jobs apart: one run directory, one job."""
        return hashlib.blake2s(str(self.run_dir).encode(), digest_size=3).hexdigest()


class PolicyBuilder:
    """Builds one model's verl tree and what the recipe adds to it.

    Args:
        model_id: the model.
        index: its place in the job, decides its ranks and ports.
        section: its section, an overlay in verl's tree plus our short keys.
        context: the job.

    Attributes:
        tree: the resolved verl tree, once ``build`` has run.
        ours: model_path, train, trainer_gpus, rollout_gpus.
        problems: what is wrong with the section.
    """

    def __init__(self, model_id: str, index: int, section: dict[str, Any], context: JobContext):
        self.model_id = model_id
        self.index = index
        self.problems: list[Problem] = []
        self.tree: dict[str, Any] = {}
        self.ours: dict[str, Any] = {}
        self._context = context
        self._layers = LayeredTree(verl_defaults())
        self._layers.apply(context.overlay, f"device/{context.device}")
        self._add_short_keys()
        self._layers.freeze_schema()
        self._layers.apply(context.policy_defaults, "policy_defaults", "policy_defaults")
        self._layers.apply(section, f"models.{model_id}", self.key())
        self.problems += self._layers.problems

    def key(self, dotted: str = "") -> str:
        """``dotted`` as the user writes it in this model's section."""
        return f"multi_model.models.{self.model_id}" + (f".{dotted}" if dotted else "")

    @property
    def origin(self) -> dict[str, str]:
        return self._layers.origin

    def get(self, dotted: str) -> Any:
        return get(self.tree, dotted)

    def build(self) -> None:
        """Add the derived settings, resolve the tree; fills ``tree``, ``ours`` and ``problems``."""
        # Interpolations see the model's verl tree first, then the job's own sections.
        config = OmegaConf.create({**self._context.job, **self._layers.tree})
        try:
            self._check_numbers(config)
            self._take_short_keys(config)
            for dotted, value in self._derived(config).items():
                self._set_derived(config, dotted, value)
            resolved = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            where = getattr(error, "full_key", None) or ""
            what = f"cannot be resolved: {str(error).splitlines()[0]}"
            self.problems.append(Problem(self.key(where), what, allowed="references into verl's tree or the job's"))
            return
        self.tree = {key: resolved[key] for key in self._layers.tree if key not in SHORT_KEYS}
        for side in ("trainer", "rollout"):
            del self.tree[side]["n_gpus"]

    def _add_short_keys(self) -> None:
        """Our keys stand in the tree while the layers merge, so they are checked and traced like verl's."""
        tree = self._layers.tree
        tree.update(model_path=None, train=None)
        for side in ("trainer", "rollout"):
            tree[side]["n_gpus"] = None
        for name in QueueSpec.model_fields:
            tree["async_training"].setdefault(name, None)
        tree["async_training"].setdefault("concurrency", None)
        self._layers.apply({"async_training": self._context.job["queue"]}, "queue")
        self._layers.apply({"async_training": {"concurrency": self._context.job["concurrency"]}}, "concurrency")

    def _check_numbers(self, config: DictConfig) -> None:
        """What derived settings and checks compute with is of its kind. A wrong value is a problem, and verl's own
        takes its place, so that the rest is checked too."""
        defaults = verl_defaults()
        for dotted in (*_COUNTS, *_NUMBERS):
            value, kind = OmegaConf.select(config, dotted), int if dotted in _COUNTS else (int, float)
            wrong = isinstance(value, bool) or not isinstance(value, kind) or (dotted in _COUNTS and value < 1)
            if wrong and not (value is None and dotted in _MAY_BE_NULL):
                what = "must be an integer >= 1" if dotted in _COUNTS else "must be a number"
                self.problems.append(Problem(self.key(dotted), what, value))
                OmegaConf.update(config, dotted, get(defaults, dotted), merge=False)

    def _take_short_keys(self, config: DictConfig) -> None:
        self.ours = {"model_path": self._absolute(config.model_path), "train": config.train}
        if not isinstance(self.ours["train"], bool):
            self.problems.append(Problem(self.key("train"), "must be true or false", self.ours["train"]))
        for side in ("trainer", "rollout"):
            least = 0 if side == "trainer" and self.ours["train"] is False else 1
            count = config[side].n_gpus
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                self.problems.append(Problem(self.key(f"{side}.n_gpus"), f"must be an integer >= {least}", count))
                count = 1
            self.ours[f"{side}_gpus"] = count
        if self.ours["train"] is False:
            self.ours["trainer_gpus"] = 0

    def _absolute(self, path: Any) -> Any:
        """An existing folder as an absolute path, since actors run elsewhere; anything else unchanged."""
        if isinstance(path, str) and path and Path(path).expanduser().is_dir():
            return str(Path(path).expanduser().resolve())
        return path

    def _nodes(self, side: str) -> tuple[int, int]:
        """(nodes, GPUs per node) of the trainer or the rollout side."""
        count, per_node = self.ours[f"{side}_gpus"], self._context.job["run"]["gpus_per_node"]
        if count <= per_node:
            return 1, count
        if count % per_node:
            self.problems.append(
                Problem(
                    self.key(f"{side}.n_gpus"),
                    f"does not fill whole nodes of {per_node}",
                    count,
                    fix="run.gpus_per_node",
                )
            )
        return count // per_node, per_node

    def horizon(self, trigger: int) -> int | None:
        """Optimizer steps until this policy's target; verl sets it too late for its workers (FAT:356)."""
        stop = self._context.job["stop"]
        return stop["updates"] * trigger if stop["by"] == "updates" and stop["updates"] else None

    def master_port_range(self) -> tuple[int, int]:
        """A slice of ``run.master_port_range`` that no other model of this job has (C11).

        Another job's model may have the same one, and verl closes the port that it found before a trainer binds it
        (verl/single_controller/ray/base.py:get_master_addr_port): with two jobs on a node a port can still be lost.
        """
        first, last = self._context.job["run"]["master_port_range"]
        slices = max(1, (last - first) // PORTS_PER_MODEL)
        start = first + (int(self._context.tag, 16) + self.index) % slices * PORTS_PER_MODEL
        return start, start + PORTS_PER_MODEL

    @property
    def namespace(self) -> str:
        """Prefix of everything cluster-wide that this model owns (C1, C2, C9); no two jobs share one."""
        return f"{self._context.tag}-{self.model_id}"

    @property
    def replica_rank_offset(self) -> int:
        return self.index * RANKS_PER_MODEL

    def _derived(self, config: DictConfig) -> dict[str, Any]:
        job, group_size = self._context.job, self._context.job["workflow"]["n"]
        values: dict[str, Any] = {
            "actor_rollout_ref.model.path": self.ours["model_path"],
            "actor_rollout_ref.hybrid_engine": False,
            "rollout.n": group_size,
            "actor_rollout_ref.rollout.n": group_size,
            "actor_rollout_ref.rollout.val_kwargs.n": job["validation"]["n"],
            "actor_rollout_ref.rollout.custom.namespace": self.namespace,
            "actor_rollout_ref.rollout.custom.replica_rank_offset": self.replica_rank_offset,
            "trainer.project_name": job["run"]["name"],
            "trainer.experiment_name": self.model_id,
            "trainer.default_local_dir": str(self._context.run_dir / "checkpoints" / self.model_id),
            "trainer.logger": list(job["metrics"]["backends"]),
            "trainer.test_freq": -1,
            "trainer.val_before_train": False,
            "trainer.save_freq": -1,
            "trainer.resume_mode": "disable",  # the runtime restores what the ledger names
            "trainer.resume_from_path": None,
            "trainer.del_local_ckpt_after_load": False,
            "trainer.default_hdfs_dir": None,
            "trainer.max_actor_ckpt_to_keep": None,
            "trainer.max_critic_ckpt_to_keep": None,
            "reward.num_workers": 0,
        }
        for side, prefixes in {"trainer": ("trainer",), "rollout": ("rollout", "actor_rollout_ref.rollout")}.items():
            nodes, per_node = self._nodes(side)
            for prefix in prefixes:
                values |= {f"{prefix}.nnodes": nodes, f"{prefix}.n_gpus_per_node": per_node}
        rollout = config.actor_rollout_ref.rollout
        if rollout.max_model_len is None:
            values["actor_rollout_ref.rollout.max_model_len"] = rollout.prompt_length + rollout.response_length
        if rollout.checkpoint_engine.backend == "nccl":
            values["actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.group_name"] = self.namespace
        if self.origin.get("critic.model.path", "verl") == "verl":  # verl's default is a folder of its authors
            values["critic.model.path"] = self.ours["model_path"]
        if self.ours["train"] is False and str(rollout.load_format).startswith("dummy"):
            # verl's default leaves random weights for the first sync to replace; a frozen policy has none
            values["actor_rollout_ref.rollout.load_format"] = "auto"
        horizon = self.horizon(config.async_training.trigger_parameter_sync_step)
        if horizon is not None:
            for optimizer in ("actor_rollout_ref.actor.optim", "critic.optim"):
                values[f"{optimizer}.total_training_steps"] = horizon
            values["trainer.total_training_steps"] = horizon
        return values

    def _set_derived(self, config: DictConfig, dotted: str, value: Any) -> None:
        by_user = self.origin.get(dotted, "verl").startswith(("policy_defaults", "models."))
        current = OmegaConf.select(config, dotted) if by_user else None
        if by_user and current is not None and current != value:  # null leaves it to the job
            fix = _SET_INSTEAD.get(dotted, "leave it out")
            self.problems.append(Problem(self.key(dotted), f"is decided by the job ({value!r})", current, fix=fix))
            return
        self._layers.set(dotted, value, DERIVED)
        OmegaConf.update(config, dotted, value, merge=False, force_add=True)


_SET_INSTEAD = {
    "actor_rollout_ref.model.path": "set model_path",
    "rollout.n": "set workflow.n",
    "actor_rollout_ref.rollout.n": "set workflow.n",
    "actor_rollout_ref.rollout.val_kwargs.n": "set validation.n",
    "actor_rollout_ref.rollout.load_format": "leave it out: nobody sends a frozen policy its weights",
    "trainer.project_name": "set run.name",
    "trainer.default_local_dir": "set run.dir",
    "trainer.logger": "set metrics.backends",
    "trainer.test_freq": "set validation.every_updates",
    "trainer.val_before_train": "set validation.before_training",
    "trainer.save_freq": "set checkpoint.every_updates",
    "trainer.max_actor_ckpt_to_keep": "set checkpoint.keep",
    "trainer.max_critic_ckpt_to_keep": "set checkpoint.keep",
    "trainer.resume_mode": "set run.dir and run.resume",
    "trainer.resume_from_path": "set run.dir and run.resume",
    "trainer.total_training_steps": "set stop.updates",
    "actor_rollout_ref.actor.optim.total_training_steps": "set stop.updates",
    "trainer.nnodes": "set trainer.n_gpus",
    "trainer.n_gpus_per_node": "set trainer.n_gpus",
    "rollout.nnodes": "set rollout.n_gpus",
    "rollout.n_gpus_per_node": "set rollout.n_gpus",
    "actor_rollout_ref.rollout.nnodes": "set rollout.n_gpus",
    "actor_rollout_ref.rollout.n_gpus_per_node": "set rollout.n_gpus",
}
