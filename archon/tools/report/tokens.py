"""Readable text of vocabulary tokens such as `Ġthe` or `▁the`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def token_texts(tokens: Sequence[str], is_input: Sequence[bool], completion: str) -> list[str]:
    """Return the text of each token.

    The alphabet is plain, GPT-2's bytes, or SentencePiece. It is the one in which the tokens that are not `is_input`
    concatenate to `completion`; otherwise, the one with a space marker that occurs. A character of several tokens is
    shown with the last of them.
    """
    spellings = {"": list(tokens), "Ġ": _decode_byte_tokens(tokens), "▁": [token.replace("▁", " ") for token in tokens]}
    for texts in spellings.values():
        if "".join(text for text, skip in zip(texts, is_input, strict=True) if not skip) == completion:
            return texts
    return next(spellings[mark] for mark in ("Ġ", "▁", "") if any(mark in token for token in tokens))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies (GPT-2).

    Printable bytes represent themselves; characters from U+0100 on represent all other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


def _decode_byte_tokens(tokens: Sequence[str]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in tokens:
        is_byte_level = all(character in _BYTES for character in token)
        content = bytes(_BYTES[character] for character in token) if is_byte_level else token.encode("utf-8", "replace")
        texts.append(decoder.decode(content))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
