"""Bytes and names of single tokens, for logprobs: a token may hold only a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# GPT-2's alphabet of bytes: a printable character of Latin-1 is its own byte, and characters from 256 on are the rest.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES_OF_CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class TokenBytes:
    """Maps token ids to bytes by the decoder of a fast tokenizer: byte-level, byte fallback, or else its text.

    With `names_are_ids`, names are `token_id:7`, as in vLLM.
    """

    def __init__(self, tokenizer: Any, names_are_ids: bool = False) -> None:
        self._tokenizer, self._names_are_ids = tokenizer, names_are_ids
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        decoder = getattr(tokenizer.backend_tokenizer, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        self._decoders = {step["type"]: step for step in state.get("decoders", [state]) if step}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token."""
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if "ByteLevel" in self._decoders and text is not None and _BYTES_OF_CHARACTERS.keys() >= set(text):
            return bytes(_BYTES_OF_CHARACTERS[character] for character in text)
        if "ByteFallback" in self._decoders and text is not None:
            byte = _BYTE.fullmatch(text)
            return text.replace("▁", " ").encode() if byte is None else bytes.fromhex(byte[1])
        return str(self._tokenizer.decode([token])).encode()

    def name(self, token: int) -> str:
        r"""Return a token's text, or `bytes:\xe2\x82` for a part of a character, as OpenAI does."""
        if self._names_are_ids:
            return f"token_id:{token}"
        try:
            self(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self(token))
        return str(self._tokenizer.decode([token]))
