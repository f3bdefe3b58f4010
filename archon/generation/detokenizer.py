"""Incremental detokenization of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from archon.schema.errors import TokenizerError

REPLACEMENT = "\ufffd"
_MAX_WAITING = 16  # tokens; a character has at most four bytes, so more cannot be part of a character


class Detokenizer:
    """Incremental detokenizer of one answer; a token with an incomplete character waits for the next ones.

    The texts from `feed` and `finish` add up to `decode` of all tokens. Only replacement characters (U+FFFD) may
    differ, if the tokens' bytes are not UTF-8, because returned text cannot change.

    Args:
        tokenizer: a fast tokenizer of transformers; TokenizerError otherwise.
        skip_special_tokens: omit special tokens from the text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{type(tokenizer).__name__} cannot decode token by token, as streams and stop strings need; expected "
                "a fast tokenizer: save it with a tokenizer.json"
            )
        self._tokenizer, self._skip = backend, skip_special_tokens
        self._settled: list[int] = []  # last tokens with returned text; the next text depends on them
        self._waiting: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def feed(self, token: int) -> str:
        """Add a token. Returns the text completed by it, possibly empty."""
        self._waiting.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001 (its only class) bytes that are not UTF-8 would change text already returned
            return self.finish()
        if text is None:
            return self.finish() if len(self._waiting) >= _MAX_WAITING else ""
        self._settled, self._waiting = self._waiting, []
        return str(text)

    def pending(self) -> str:
        """Return the text of the waiting tokens, an incomplete character as U+FFFD."""
        if not self._waiting:
            return ""
        known, text = self.decode(self._settled), self.decode(self._settled + self._waiting)
        return text[len(known) :] if text.startswith(known) else self.decode(self._waiting)

    def finish(self) -> str:
        """Return the text of the waiting tokens, which no longer wait for following ones."""
        text = self.pending()
        if text:  # no following token can complete an incomplete character
            self._settled = [] if text.endswith(REPLACEMENT) else self._waiting
        self._waiting = []
        self._stream = DecodeStream(self._settled, self._skip)
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens of an answer."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip))
