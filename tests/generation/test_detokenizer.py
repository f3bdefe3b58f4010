"""Text decoded token by token is the text of all tokens at once, whatever the tokenizer's kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from archon.generation.detokenizer import Detokenizer
from archon.schema.errors import TokenizerError
from tests.data.toy_tokenizers import toy_tokenizer

LONGEST_WAIT = 16
TEXTS = [
    "Größe 数学 émile 🙂🙃 apples",
    "👩‍👩‍👧 e\u0301 \u202e \ufffd \ufffd",
    "  two spaces\n\n\tand a tab ",
    " 数",
    "",
    "plain",
]


def byte_fallback_tokenizer() -> Any:
    """As Llama's first: pieces of words with ▁ for a space, and a token a byte for all other characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefilmnopstw", "▁a", "an", "▁an"]
    merges = [("▁", "a"), ("a", "n"), ("▁a", "n")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


TOKENIZERS = {"byte-level": toy_tokenizer(), "byte-fallback": byte_fallback_tokenizer()}


def streamed(tokenizer: Any, tokens: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.feed(token) for token in tokens] + [detokenizer.finish()]


def whole(tokenizer: Any, tokens: list[int], skip: bool = True) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def check_exact(tokenizer: Any, tokens: list[int], skip: bool = True) -> None:
    pieces = streamed(tokenizer, tokens, skip)
    assert "".join(pieces) == whole(tokenizer, tokens, skip)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stream_adds_up_to_the_whole(kind: str, text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text).input_ids
    if kind == "byte-level" or text == TEXTS[0]:
        assert any("\ufffd" in whole(tokenizer, [token]) for token in tokens) != text.isascii()
    check_exact(tokenizer, tokens, skip)
    special = tokenizer.eos_token_id
    check_exact(
        tokenizer, [token for pair in zip(tokens, [special] * len(tokens), strict=True) for token in pair], skip
    )
    check_exact(tokenizer, [special, special, *tokens, special], skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_is_exact(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    check_exact(tokenizer, tokenizer(text).input_ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_complete_characters_are_returned_at_once_and_never_in_parts(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(TEXTS[0]).input_ids
    pieces = streamed(tokenizer, tokens)
    assert not any("\ufffd" in piece for piece in pieces) and pieces[-1] == ""
    for count in range(len(tokens)):
        text = whole(tokenizer, tokens[: count + 1])
        if not text.endswith("\ufffd"):
            assert "".join(pieces[: count + 1]) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pending_is_what_has_not_been_returned(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    text = ""
    for count, token in enumerate(tokens := tokenizer("a 数 a").input_ids):
        text += detokenizer.feed(token)
        if kind == "byte-level":  # the other turns complete characters before an incomplete one to U+FFFD as well
            assert text + detokenizer.pending() == whole(tokenizer, tokens[: count + 1])
    assert detokenizer.pending() == "" and text == "a 数 a"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_no_text_hold_nothing_back_and_break_nothing(kind: str, seed: int) -> None:
    """Whatever an untrained model samples; behind it, text is read as it is."""
    tokenizer = TOKENIZERS[kind]
    chance = random.Random(seed)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    waits = longest = 0
    for token in (chance.randrange(len(tokenizer)) for _ in range(500)):
        waits = 0 if detokenizer.feed(token) else waits + 1
        longest = max(longest, waits)
    assert longest <= LONGEST_WAIT
    tokens = tokenizer("plain plain 数 plain").input_ids
    assert "".join(map(detokenizer.feed, tokens)).endswith("plain 数 plain")


def test_a_lone_byte_behind_a_character_of_bytes_does_not_take_it_back() -> None:
    """Byte fallback turns a whole run of bytes to U+FFFD where its end is not UTF-8."""
    tokenizer = TOKENIZERS["byte-fallback"]
    token_of = {byte: tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)}
    tokens = [*map(token_of.get, "数".encode()), token_of[0xE6], tokenizer.convert_tokens_to_ids("a")]
    assert whole(tokenizer, tokens) == "\ufffd" * 4 + "a"
    assert "".join(streamed(tokenizer, tokens)) == "数\ufffda"


def test_special_tokens_in_any_number_hold_nothing_back() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    special, (*_, a) = tokenizer.eos_token_id, tokenizer("an a").input_ids
    tokens = [*tokenizer("an").input_ids, *[special] * 100, a, a]
    assert streamed(tokenizer, tokens)[-3:] == [" a", " a", ""]
    check_exact(tokenizer, tokens)


def test_a_tokenizer_that_cannot_stream_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"object cannot decode token by token.*expected a fast tokenizer"):
        Detokenizer(object(), skip_special_tokens=True)
