"""Any set by key mapping: RL and SFT rows, filters that say what they filtered, errors that name key and line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from archon.data import VALID_DATASETS, encode_prompt, get_custom_dataset
from archon.schema.errors import DatasetError, TokenizerError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer

KEYS: dict[str, Any] = {"prompt_key": "q", "response_key": "a"}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rl_rows_carry_messages_prompt_answer_and_the_other_columns(tmp_path: Path) -> None:
    file = write(tmp_path, {"q": "12+34?", "a": 46, "level": 3})
    rows = get_custom_dataset(file, **KEYS, system_prompt="Be brief.", instruction="Box it.")
    assert rows[0] == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+34?\nBox it."}],
        "prompt": "Be brief.\n12+34?\nBox it.",
        "answer": "46",
        "level": 3,
    }


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "12?"}]
    file = write(tmp_path, {"q": messages, "a": "46"})
    (row,) = get_custom_dataset(file, **KEYS, system_prompt="not mine")
    assert row["messages"] == messages


def test_sft_rows_are_token_ids_and_mask(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(CHATML)
    file = write(tmp_path, {"q": "12+34?", "a": "It is 46."})
    (row,) = get_custom_dataset(file, kind="sft", tokenizer=tokenizer, **KEYS)
    assert set(row) == {"input_ids", "loss_mask"}
    prompt = encode_prompt(tokenizer, get_custom_dataset(file, **KEYS)[0])
    assert row["input_ids"][: len(prompt)] == prompt
    assert tokenizer.decode(row["input_ids"][len(prompt) :]) == "It is 46.<|im_end|>\n"


def test_whole_conversations_are_sft_rows_without_response_key(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "30"}]
    file = write(tmp_path, {"q": conversation})
    (row,) = get_custom_dataset(file, kind="sft", tokenizer=toy_tokenizer(CHATML), prompt_key="q", response_key=None)
    assert sum(row["loss_mask"]) > 0


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_max_length_filters_and_says_how_many(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, *({"q": "12 " * n, "a": "46"} for n in range(1, 41)))
    tokenizer = toy_tokenizer(CHATML)
    everything = get_custom_dataset(file, kind=kind, tokenizer=tokenizer, **KEYS)
    ids = [row["input_ids"] if kind == "sft" else encode_prompt(tokenizer, row) for row in everything]
    limit = len(ids[24])
    with caplog.at_level(logging.WARNING):
        kept = get_custom_dataset(file, kind=kind, tokenizer=tokenizer, max_length=limit, **KEYS)
    assert (len(kept), kept.n_filtered) == (25, 15)
    assert list(kept) == everything[:25]
    assert f"15 of 40 rows that are longer than max_length={limit} tokens" in caplog.text
    with pytest.raises(DatasetError, match=r"all 40 rows of .* are longer than max_length=2 tokens \(the shortest has"):
        get_custom_dataset(file, kind=kind, tokenizer=tokenizer, max_length=2, **KEYS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"q": "12"}, r"train\.jsonl:2: no key 'a'; the row has: 'q'"),
        ({}, r"train\.jsonl:2: no key 'q'; the row has: nothing"),
        ({"q": "", "a": "3"}, r"train\.jsonl:2: 'q' is empty"),
        ({"q": "12", "a": None}, r"train\.jsonl:2: 'a' is empty"),
        ({"q": 12, "a": "3"}, r"train\.jsonl:2: 'q' must be a string or a list of messages"),
        ({"q": [], "a": "3"}, r"train\.jsonl:2: 'q' must be a string or a list of messages"),
        ({"q": [{"role": "user"}], "a": "3"}, r"train\.jsonl:2: 'q' must be a string or a list of messages"),
    ],
)
def test_a_missing_or_wrong_key_is_named_with_its_line(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    file = write(tmp_path, {"q": "12", "a": "3"}, bad)
    with pytest.raises(DatasetError, match=message):
        get_custom_dataset(file, **KEYS)
    with pytest.raises(DatasetError, match=message):
        get_custom_dataset(file, kind="sft", tokenizer=toy_tokenizer(CHATML), **KEYS)


def test_an_sft_response_must_be_text(tmp_path: Path) -> None:
    file = write(tmp_path, {"q": "12", "a": {"steps": []}})
    with pytest.raises(DatasetError, match=r"train\.jsonl:1: 'a' is a dict; expected a string"):
        get_custom_dataset(file, kind="sft", tokenizer=toy_tokenizer(CHATML), **KEYS)


def test_what_a_call_lacks_is_said(tmp_path: Path) -> None:
    file = write(tmp_path, {"q": "12", "a": "3"})
    with pytest.raises(TokenizerError, match=r"SFT rows of .* are token ids: pass a tokenizer"):
        get_custom_dataset(file, kind="sft", **KEYS)
    with pytest.raises(DatasetError, match=r"max_length is 9 .* in tokens; pass a tokenizer too"):
        get_custom_dataset(file, max_length=9, **KEYS)
    assert "answer" not in get_custom_dataset(file, prompt_key="q", response_key=None)[0]
    with pytest.raises(DatasetError, match="kind is 'ppo'; expected one of rl, sft, dpo, rw"):
        get_custom_dataset(file, kind="ppo")  # type: ignore[arg-type]


def test_rl_rows_need_no_gold_answer(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "12", "answer": 3}, {"prompt": "4", "answer": None})
    for options, answers in (({}, ("3",)), ({"response_key": None}, (3,))):
        rows = get_custom_dataset(file, **options)
        assert [(row["prompt"], row["answer"]) for row in rows] == [("12", answers[0]), ("4", None)]
    with pytest.raises(DatasetError, match=r"train\.jsonl:1: no key 'gold'"):
        get_custom_dataset(file, response_key="gold")
    file = write(tmp_path, {"prompt": "12", "response": "3"}, {"prompt": "4"})
    with pytest.raises(DatasetError, match=r"train\.jsonl:2: no key 'response'"):
        get_custom_dataset(file)


def test_datasets_have_the_names_they_promise() -> None:
    names = ["arithmetic", "clevr_count_70k", "geometry3k", "gsm8k", "hh-rlhf", "hh_rlhf", "shapes", "torl_data"]
    assert list(VALID_DATASETS) == names
