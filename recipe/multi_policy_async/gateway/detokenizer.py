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
"""Token ids -> text piece by piece, never showing half a character, and stop strings over that text."""

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of byte-fallback models


class Detokenizer(Protocol):
    """One per generation. What ``feed`` returned so far, joined, is the text."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often empty."""

    def feed_all(self, ids: Sequence[int]) -> str:
        """The same for several tokens at once."""

    def flush(self) -> str:
        """What is left at the end; an unfinished character is left out, never shown as U+FFFD."""


def make_detokenizer_factory(tokenizer: Tokenizer, hidden: frozenset[int] | None = None) -> Callable[[], Detokenizer]:
    """The exact byte-wise detokenizer for byte-level models (Qwen, Llama 3, GPT-2, ...), else the general one.

    Args:
        hidden: ids that have no text; by default all special tokens.
    """
    if hidden is None:
        added = tokenizer.get_added_tokens_decoder()
        hidden = frozenset(token_id for token_id, token in added.items() if token.special)
    if _is_byte_level(tokenizer):
        pieces = _BytePieces(tokenizer, hidden)
        return lambda: _ByteLevelDetokenizer(pieces)
    return lambda: _WindowDetokenizer(tokenizer, hidden)


def make_token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes of one token, special ones included, for log-prob reports: a token may be a part of a character."""
    if _is_byte_level(tokenizer):
        return _BytePieces(tokenizer, frozenset()).__getitem__

    def token_bytes(token_id: int) -> bytes:
        fallback = _BYTE_TOKEN.fullmatch(tokenizer.id_to_token(token_id) or "")
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()

    return token_bytes


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))] == ["ByteLevel"]


def _unicode_to_byte() -> dict[str, int]:
    """Inverse of the byte -> printable character table of byte-level BPE (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class _BytePieces(dict[int, bytes]):
    """Token id -> its bytes, filled as ids are met; hidden ones have none."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._hidden = hidden
        self._bytes = _unicode_to_byte()

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            piece = b""
        elif token_id in self._added:
            piece = self._added[token_id].encode()
        else:
            text = self._tokenizer.id_to_token(token_id) or ""
            piece = bytes(self._bytes[c] for c in text) if all(c in self._bytes for c in text) else text.encode()
        self[token_id] = piece
        return piece


class _ByteLevelDetokenizer:
    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_id: int) -> str:
        return self._decode(self._pieces[token_id])

    def feed_all(self, ids: Sequence[int]) -> str:
        return self._decode(b"".join([self._pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        return ""  # bytes that are still pending are an unfinished character


class _WindowDetokenizer:
    """For any decoder: decodes a short window twice per token and emits what the token added.

    The window keeps the tokens before it as context, since many decoders treat the first token differently.
    """

    _LONGEST = 64  # a run of so many tokens without a whole character is no character at all: give up on it

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._hidden = hidden
        self._ids: list[int] = []
        self._context = 0  # start of the window
        self._done = 0  # tokens whose text was emitted

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        return self._emit(final=len(self._ids) - self._done > self._LONGEST)

    def feed_all(self, ids: Sequence[int]) -> str:
        return "".join([self.feed(token_id) for token_id in ids])

    def flush(self) -> str:
        return self._emit(final=True).rstrip(_REPLACEMENT)

    def _emit(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not final):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return now[len(before) :]


class StopScanner:
    """Holds back text that may become a stop string and cuts at the first one completed.

    The gateway owns stop strings, since an engine loses its state when a call is aborted for a weight sync and
    resumed, and since servers without a tokenizer cannot look for text at all.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""  # what came behind the match in the piece that completed it

    def feed(self, text: str) -> str:
        """The text that can be shown now; ``matched`` is set once a stop string is complete."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            end, at, self.matched = min(hits)
            shown, self.rest, self._held = self._held[:at], self._held[end:], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The held text, when the generation ends without a match."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
