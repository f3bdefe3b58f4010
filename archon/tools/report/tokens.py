"""Decode the tokens of a vocabulary, for example `Ġthe` or `▁the`, to readable text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def token_texts(tokens: Sequence[str], is_input: Sequence[bool], completion: str) -> list[str]:
    """Return the text of each token.

    Uses the alphabet (plain, GPT-2's bytes, or SentencePiece) in which the tokens that are not `is_input` concatenate
    to `completion`; if there is none, the one whose space marker occurs. A character encoded by several tokens is shown
    with the last of them.
    """
    spellings = {"": list(tokens), "Ġ": _decode_byte_tokens(tokens), "▁": [token.replace("▁", " ") for token in tokens]}
    for texts in spellings.values():
        if "".join(text for text, is_given in zip(texts, is_input, strict=True) if not is_given) == completion:
            return texts
    return next(spellings[mark] for mark in ("Ġ", "▁", "") if any(mark in token for token in tokens))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies (GPT-2).

    Printable bytes are represented by themselves, the others by characters from U+0100 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(unseen)}


_BYTES = _byte_alphabet()


def _decode_byte_tokens(tokens: Sequence[str]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in tokens:
        spelled = all(character in _BYTES for character in token)
        content = bytes(_BYTES[character] for character in token) if spelled else token.encode("utf-8", "replace")
        texts.append(decoder.decode(content))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
