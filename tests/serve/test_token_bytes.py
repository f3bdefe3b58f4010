"""The bytes of tokens that are parts of characters."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from archon.rl.bootstrap import make_tokenizer
from archon.serve.token_bytes import TokenBytes
from archon.training.config import TokenizerRecipe
from tests.data.toy_tokenizers import toy_tokenizer

TEXT = "Größe 数学 🙂 x<|im_end|>"


def byte_fallback() -> Any:
    """As in Llama 2: bytes that are no token are written in hexadecimal."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581x": 256, "x": 257, "\u2581": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("tokenizer", [toy_tokenizer(), make_tokenizer(TokenizerRecipe(kind="bpe"))])
def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT).input_ids
    token_bytes = TokenBytes(tokenizer)
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens)
    assert b"".join(map(token_bytes, tokens)).decode() == tokenizer.decode(tokens) == TEXT
    names = {token_bytes.name(token) for token in tokens}
    assert not any("\ufffd" in name for name in names) and any(name.startswith("bytes:\\x") for name in names)


def test_bytes_that_are_tokens() -> None:
    tokenizer = byte_fallback()
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(map(token_bytes, [256, *"é".encode()])) == " xé".encode()
    assert token_bytes.name("é".encode()[0]) == "bytes:\\xc3"


def test_tokens_without_bytes_are_their_text() -> None:
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet="aé", chat_template="plain"))
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(token).decode() for token in tokenizer("aé").input_ids] == ["a", "é"]
