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
"""Chat messages -> token ids, without torch.

transformers' AutoTokenizer imports torch; the ``tokenizers`` library and transformers' template renderer do not, and
give the same ids for every model that ships a tokenizer.json.
"""

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ..vision import ImageProcessor
from .detokenizer import Detokenizer, make_detokenizer_factory, make_token_bytes
from .errors import TemplateRefused
from .images import ModelImages
from .off_loop import LONG_TEXT

logger = logging.getLogger(__name__)

# Noncharacter that marks special-token text inside a client's strings between rendering and encoding.
_GUARD = "\ufdd0"

# What stands between two control tokens is encoded by itself and remembered: a system prompt is the same in every call,
# a question in every workflow of its task, and encoding is the most expensive part of a call.
_REMEMBERED_PIECES = 2048
_LONGEST_REMEMBERED = 16_384  # characters


class SampledText(str):
    """What the model itself said: special tokens in it are special tokens."""


class PolicyTokenizer:
    """The tokenizer and chat template of one model.

    Attributes:
        end_of_turn_ids: ids that end a turn when sampled (eos ids of the tokenizer and the generation config).
        images: what the model makes of images; None when it takes none.
        token_bytes: the bytes of one token; of a character that is split over tokens, its part.
    """

    images: ModelImages | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        special_tokens: dict[str, str] | None = None,
        end_of_turn_ids: tuple[int, ...] = (),
        response_schema: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._plain: Tokenizer | None = None
        self._chat_template = chat_template
        self._template_variables = dict(special_tokens or {})
        self.end_of_turn_ids = end_of_turn_ids
        self.response_schema = response_schema
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._new_detokenizer = make_detokenizer_factory(tokenizer)
        self._new_marking_detokenizer = make_detokenizer_factory(tokenizer, frozenset(end_of_turn_ids))
        self.token_bytes = make_token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        specials = [token.content for token in added.values() if token.special]
        longest_first = sorted(specials, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, longest_first))) if specials else None
        self._special_id = {text: tokenizer.token_to_id(text) for text in specials}
        self._remember = self._special_text is not None and pieces_stand_alone(tokenizer)
        self._remembered = functools.lru_cache(_REMEMBERED_PIECES)(self._encode_piece)

    @classmethod
    def load(cls, model_path: str) -> "PolicyTokenizer":
        """Read a model folder.

        Raises:
            ValueError: the folder has no tokenizer or no chat template.
        """
        folder = Path(model_path)
        config = _read_json(folder / "tokenizer_config.json")
        tokenizer = _load_backend(folder)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        end_ids = _as_list(_read_json(folder / "generation_config.json").get("eos_token_id"))
        end_ids += _as_list(tokenizer.token_to_id(special_tokens.get("eos_token", "")))
        processor = ImageProcessor.load(folder)
        policy = cls(
            tokenizer,
            _chat_template(folder, config, of_processor=processor is not None),
            special_tokens=special_tokens,
            end_of_turn_ids=tuple(dict.fromkeys(end_ids)),
            response_schema=config.get("response_schema"),
        )
        policy.images = None if processor is None else ModelImages(processor)
        return policy

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Apply the chat template. Special-token text in messages and tools comes out guarded, see ``encode``.

        Raises:
            TemplateRefused: by the template, for these messages.
        """
        if self._special_text is not None:
            messages, tools = _guard(messages, self._special_text), _guard(tools, self._special_text)
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                **{**self._template_variables, **template_kwargs},
            )
        except Exception as error:
            # A template is a program: what it raises on odd messages is of any type, and always the messages' fault.
            # Counted under its code where it is sent.
            logger.info("chat template refused a request: %r", error)
            message = f"the model's chat template refuses these messages: {error}"
            raise TemplateRefused(message, param="messages") from error
        return rendered[0]

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. Guarded special-token text becomes plain text, never a control token."""
        if not self._remember and _GUARD not in text:
            return self._encode_piece(text)
        ids: list[int] = []
        position = 0
        for match in self._special_text.finditer(text) if self._special_text is not None else ():
            ids += self._encode_plain(text[position : match.start()])
            ids.append(self._special_id[match.group()])
            position = match.end()
        ids += self._encode_plain(text[position:])
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        return _ids(self._tokenizer, text)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if _GUARD not in text:
            short = self._remember and len(text) <= _LONGEST_REMEMBERED
            return self._remembered(text) if short else self._encode_piece(text)
        if self._plain is None:
            # A second instance: the flag is the instance's, and long texts are encoded in other threads meanwhile.
            self._plain = Tokenizer.from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        return _ids(self._plain, text.replace(_GUARD, ""))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token, for log-prob reports; bytes that are no whole character are escaped, as OpenAI does it."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, at whose borders nothing merges."""
        return token_id in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The control token of exactly this text."""
        return self._special_id.get(text)

    def begins_special(self, text: str) -> bool:
        """Whether the text begins with a control token."""
        return self._special_text is not None and self._special_text.match(text) is not None

    def new_detokenizer(self) -> Detokenizer:
        """Special tokens have no text."""
        return self._new_detokenizer()

    def new_marking_detokenizer(self) -> Detokenizer:
        """Special tokens but ends of turn have their text, for parsers whose markers are special tokens."""
        return self._new_marking_detokenizer()


def pieces_stand_alone(tokenizer: Tokenizer) -> bool:
    """Whether the text between two control tokens has the same ids by itself as in its place.

    True for byte-level models that add no space in front (Qwen, Llama 3, GPT-2, ...): nothing in them looks beyond a
    control token, unless such a token takes the white space beside it or another added token could overlap it.
    """
    pre, normalizer = _part(tokenizer.pre_tokenizer), _part(tokenizer.normalizer)
    steps = pre.get("pretokenizers", [pre])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    known_steps = all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
    if not byte_level or not known_steps or any(step["add_prefix_space"] for step in byte_level):
        return False
    if normalizer and normalizer["type"] not in ("NFC", "NFKC"):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token for token in added if token.special]
    begins = {token.content[0] for token in special}
    overlaps = any(begins & set(token.content[1:]) for token in added if not token.special)
    return not overlaps and not any(token.lstrip or token.rstrip or token.normalized for token in special)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False).ids
    # Only the batched call lets other threads run meanwhile, the loop's above all.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _part(component: Any) -> dict[str, Any]:
    return {} if component is None else json.loads(component.__getstate__())


def _guard(value: Any, special_text: re.Pattern[str]) -> Any:
    """Copy of ``value`` with a guard inside every special-token text; ``value`` itself where there is none."""
    if isinstance(value, SampledText):
        return value
    if isinstance(value, str):
        if not special_text.search(value):
            return value
        return special_text.sub(lambda match: match.group()[0] + _GUARD + match.group()[1:], value)
    if isinstance(value, dict):
        guarded = {_guard(key, special_text): _guard(item, special_text) for key, item in value.items()}
        same = guarded.keys() == value.keys() and all(item is value[key] for key, item in guarded.items())
        return value if same else guarded
    if isinstance(value, list):
        items = [_guard(item, special_text) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def _load_backend(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    logger.info("%s has no tokenizer.json: converting its tokenizer with transformers, which imports torch", folder)
    from transformers import AutoTokenizer

    backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder}: only models with a fast tokenizer (tokenizer.json) can be served")
    return backend


def _chat_template(folder: Path, config: dict[str, Any], *, of_processor: bool) -> str:
    """The model's template; that of its processor, where it has one, may be the only one that knows images."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text()
    template = _read_json(folder / "chat_template.json").get("chat_template") if of_processor else None
    template = template or config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{folder} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: the variables chat templates expect besides the messages."""
    tokens = {}
    for config in configs:
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
