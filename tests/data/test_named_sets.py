"""The named sets: arithmetic, whose splits are disjoint, and gsm8k."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.data import encode_prompt, get_custom_dataset, get_gsm8k_rl_dataset, get_gsm8k_sft_dataset
from archon.data.named_datasets import arithmetic_pairs
from archon.schema.errors import DatasetError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_arithmetic_splits_cover_all_pairs_and_are_disjoint_even_mirrored(seed: int) -> None:
    train, test = arithmetic_pairs("train", seed), arithmetic_pairs("test", seed)
    assert (len(train), len(test)) == (9000, 1000)
    assert {*train, *test} == {(a, b) for a in range(100) for b in range(100)}
    assert not {*train} & {(b, a) for a, b in test}


def test_the_arithmetic_split_is_fixed_by_its_seed() -> None:
    assert arithmetic_pairs("test", 0)[:3] == [(23, 58), (50, 22), (23, 68)]  # held out in every release
    assert set(arithmetic_pairs("test", 1)) != set(arithmetic_pairs("test", 0))
    assert arithmetic_pairs("train", 0) != sorted(arithmetic_pairs("train", 0))


def test_arithmetic_rows_are_digit_text() -> None:
    rows = get_custom_dataset("arithmetic", split="test")
    assert len(rows) == 1000
    for row, (a, b) in zip(rows, arithmetic_pairs("test"), strict=True):
        assert row == {
            "messages": [{"role": "user", "content": f"{a}+{b}="}],
            "prompt": f"{a}+{b}=",
            "answer": str(a + b),
        }


@pytest.mark.parametrize("template", [CHATML, None])
def test_arithmetic_sft_continues_the_very_rl_prompt(template: str | None) -> None:
    tokenizer = toy_tokenizer(template)
    sft = get_custom_dataset("arithmetic", kind="sft", split="test", tokenizer=tokenizer)
    for row, rl_row in zip(sft[:50], get_custom_dataset("arithmetic", split="test"), strict=False):
        prompt = encode_prompt(tokenizer, rl_row)
        assert row["input_ids"][: len(prompt)] == prompt
        trained = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert tokenizer.decode(trained) == rl_row["answer"] + "<|im_end|>"


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DatasetError, match="split is 'dev'; expected 'train' or 'test'"):
        get_custom_dataset("arithmetic", split="dev")


@pytest.mark.data
def test_gsm8k_has_all_its_rows(data_dir: Path) -> None:
    train = get_gsm8k_rl_dataset(data_dir / "gsm8k", "train")
    assert (len(train), len(get_gsm8k_rl_dataset(data_dir / "gsm8k", "test"))) == (7473, 1319)
    assert set(train[0]) == {"messages", "prompt", "answer"}
    assert train[0]["messages"][0]["content"].endswith(r"put your final answer within \boxed{}.")
    assert all("\n#### " in row["answer"] for row in train)


@pytest.mark.data
def test_gsm8k_sft_trains_every_solution_as_it_stands(data_dir: Path) -> None:
    tokenizer = toy_tokenizer(CHATML)
    rows = get_gsm8k_sft_dataset(data_dir / "gsm8k", "test", tokenizer=tokenizer)
    gold = get_gsm8k_rl_dataset(data_dir / "gsm8k", "test")
    for row, rl_row in zip(rows, gold, strict=True):
        trained = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert tokenizer.decode(trained) == rl_row["answer"] + "<|im_end|>"


@pytest.mark.data
def test_gsm8k_by_name_is_found_where_the_data_stands(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_DATA", str(data_dir))
    assert len(get_custom_dataset("gsm8k", split="test")) == 1319
    plain = get_custom_dataset("gsm8k", split="test", instruction="Think.", system_prompt="S")
    assert plain[0]["messages"][0] == {"role": "system", "content": "S"}
    assert plain[0]["messages"][1]["content"].endswith("\nThink.")
    by_keys = get_custom_dataset(data_dir / "gsm8k", split="test", prompt_key="question", response_key="answer")
    assert [row["answer"] for row in by_keys] == [row["answer"] for row in plain]


@pytest.mark.parametrize("option", ["data_dir", "subset"])
def test_an_option_that_a_set_would_not_look_at_is_refused(option: str) -> None:
    with pytest.raises(DatasetError, match=f"{option} is 'x', but .*leave {option} out"):
        get_custom_dataset("arithmetic", **{option: "x"})
