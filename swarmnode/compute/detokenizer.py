"""Turn token ids into text as they come: the deltas of a reply joined are the decode of all its ids.

Decoding single tokens would lose SentencePiece's spaces and split characters; decoding everything again would cost
n². So a window of the last few tokens is decoded, and of its text what was shown before is taken off. Held back is
what later tokens can still change: an incomplete UTF-8 sequence, and, where a tokenizer falls back to bytes, a run of
byte tokens (its decoder turns the whole run into U+FFFD if any part of it is invalid).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 10
_KEPT_TOKENS = 5
"""An incomplete UTF-8 sequence has at most 3 bytes, so at most 3 tokens; the rest keeps decoders that treat the first
token specially (a stripped leading space) away from the text that is still to come."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Vocabulary:
    """What detokenizing needs to know about a tokenizer; made once per model, shared by its replies."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # A byte-level vocabulary may hold such a token as plain text; a byte-fallback decoder makes it a byte.
        self._byte_ids = frozenset(
            token_id
            for text, token_id in tokenizer.get_vocab().items()
            if _BYTE_TOKEN.fullmatch(text) and tokenizer.decode([token_id]) != text
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special ones among them."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """The reference: text of a whole reply, special tokens skipped."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def is_byte(self, token_id: int) -> bool:
        """True for a byte-fallback token such as <0xE4>."""
        return token_id in self._byte_ids

    def is_silent(self, token_id: int) -> bool:
        """True for special tokens and ids that no token has (padding of the model's vocabulary)."""
        return token_id in self.special_ids or self._tokenizer.id_to_token(token_id) is None


class IncrementalDetokenizer:
    """One reply's detokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were returned before."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often "", never half a character."""
        if self._vocabulary.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._vocabulary.is_byte(token_id):
            return ""
        text = _certain(self._vocabulary.decode(self._window))
        delta = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) >= _WINDOW_TOKENS:
            self._shorten()
        return delta

    def finish(self) -> str:
        """The rest, at the end of the reply: an incomplete sequence becomes U+FFFD here and nowhere else."""
        text = self._vocabulary.decode(self._window) if self._window else ""
        delta = text[self._shown :]
        self._window, self._shown = [], 0
        return delta

    def _shorten(self) -> None:
        """Keep the last tokens only, if they decode to some text that later tokens cannot change."""
        kept = self._window[-_KEPT_TOKENS:]
        text = _certain(self._vocabulary.decode(kept))
        if text:
            self._window, self._shown = kept, len(text)


def _certain(text: str) -> str:
    return text[:-1] if text.endswith(_REPLACEMENT) else text
