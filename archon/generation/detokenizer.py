"""Text of tokens as they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from archon.schema.errors import TokenizerError

REPLACEMENT = "\ufffd"
_MAX_WAITING = 16  # tokens; a character has at most four bytes, so that more are bytes of no text


class Detokenizer:
    """Decodes an answer token by token; a token that ends inside a character waits for the next ones.

    What `feed` and `finish` return adds up to the text that all tokens have at once. Only where the tokens' bytes are
    not UTF-8 may the two differ in their replacement characters (U+FFFD): text that was returned is not taken back.

    Args:
        tokenizer: of transformers, with a `tokenizer.json` behind it; `TokenizerError` otherwise.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{type(tokenizer).__name__} cannot decode token by token, as streams and stop strings need; expected "
                "a fast tokenizer: save it with a tokenizer.json"
            )
        self._tokenizer, self._skip = backend, skip_special_tokens
        self._settled: list[int] = []  # last tokens whose text was returned: that of the next depends on them
        self._waiting: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def feed(self, token: int) -> str:
        """Add a token. Returns the text that is complete by now, empty where none is."""
        self._waiting.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001 (its only class) bytes that are not UTF-8 would change text already returned
            return self._restart()
        if text is None:
            return self._restart() if len(self._waiting) >= _MAX_WAITING else ""
        self._settled, self._waiting = self._waiting, []
        return str(text)

    def pending(self) -> str:
        """Returns the text of the tokens that wait, an incomplete character as U+FFFD."""
        if not self._waiting:
            return ""
        known, text = self.decode(self._settled), self.decode(self._settled + self._waiting)
        return text[len(known) :] if text.startswith(known) else self.decode(self._waiting)

    def finish(self) -> str:
        """Returns the rest of the text, when no token follows."""
        return self._restart()

    def _restart(self) -> str:
        text = self.pending()
        if text:  # an incomplete character is given up, and nothing that follows belongs to it
            self._settled = [] if text.endswith(REPLACEMENT) else self._waiting
        self._waiting = []
        self._stream = DecodeStream(self._settled, self._skip)
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of all tokens of an answer at once."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip))
