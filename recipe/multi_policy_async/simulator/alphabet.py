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
"""A tokenizer of 26 letters and a few signs, so that the gateway has something real to encode and decode with."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .engine import LETTERS

_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SPECIAL = ("<|im_start|>", "<|im_end|>")


def write_model_folder(folder: Path) -> Path:
    """Write what a gateway reads of a model: no weights. Ids below ``LETTERS`` are the lower-case letters."""
    letters = string.ascii_lowercase
    assert len(letters) == LETTERS
    others = [sign for sign in sorted(pre_tokenizers.ByteLevel.alphabet()) if sign not in letters]
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate([*letters, *others])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _SPECIAL[1], "chat_template": _TEMPLATE}))
    return folder
