"""Pairs of answers and the sets that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archon.data import get_custom_dataset, get_torl_data_rl_dataset
from archon.rl.bootstrap import make_tokenizer
from archon.rl.rewards import get_reward_fn
from archon.schema.errors import DatasetError
from archon.training.config import TokenizerRecipe

HUMAN = "\n\nHuman: 1?\n\nAssistant: 2\n\nHuman: 3?\n\nAssistant: "


@pytest.fixture
def tokenizer() -> Any:
    letters = "".join(sorted({*"0123456789? usertainolmh\nf", *r"\boxed{/}"}))
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet=letters, chat_template="chatml"))


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(tokenizer: Any, row: dict[str, Any], side: str) -> str:
    ids = [i for i, m in zip(row[f"{side}_ids"], row[f"{side}_loss_mask"], strict=True) if m]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["dpo", "rw"])
def test_hh_rlhf_trains_the_last_answer_alone(tmp_path: Path, tokenizer: Any, kind: Any) -> None:
    folder = write(tmp_path, {"chosen": HUMAN + "44", "rejected": HUMAN + "5"})
    rows = get_custom_dataset("hh_rlhf", kind=kind, tokenizer=tokenizer, data_dir=folder)
    assert [trained(tokenizer, rows[0], side) for side in ("chosen", "rejected")] == ["44", "5"]
    shared = rows[0]["chosen_loss_mask"].index(1)
    assert rows[0]["chosen_ids"][:shared] == rows[0]["rejected_ids"][:shared]
    assert "3?" in tokenizer.decode(rows[0]["chosen_ids"][:shared])


def test_any_file_with_prompt_and_two_answers(tmp_path: Path, tokenizer: Any) -> None:
    folder = write(tmp_path, {"prompt": "1?", "chosen": "2", "rejected": "33"})
    rows = get_custom_dataset(folder, kind="dpo", tokenizer=tokenizer)
    assert [trained(tokenizer, rows[0], side) for side in ("chosen", "rejected")] == ["2", "33"]


def test_long_pairs_are_left_out_together(tmp_path: Path, tokenizer: Any) -> None:
    short = {"prompt": "1?", "chosen": "2", "rejected": "3"}
    folder = write(tmp_path, short, short | {"rejected": "3" * 50})
    n = len(get_custom_dataset(folder, kind="dpo", tokenizer=tokenizer)[0]["chosen_ids"])
    rows = get_custom_dataset(folder, kind="dpo", tokenizer=tokenizer, max_length=n)
    assert (len(rows), rows.n_filtered) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": "2", "rejected": HUMAN + "5"},
            r"train\.jsonl:1: 'chosen' must start with '\\n\\nHuman: ', got '2'",
        ),
        (
            {"chosen": "\n\nHuman: 1?", "rejected": HUMAN},
            r"the last turn of 'chosen' has the role 'user'; expected 'assistant'",
        ),
        ({"rejected": HUMAN}, r"no key 'chosen'"),
        ({"chosen": HUMAN + "5", "rejected": ""}, r"'rejected' is empty"),
    ],
)
def test_a_malformed_pair_names_its_line(tmp_path: Path, tokenizer: Any, row: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, row)
    with pytest.raises(DatasetError, match=message):
        get_custom_dataset("hh_rlhf", kind="rw", tokenizer=tokenizer, data_dir=folder)


def test_a_named_set_says_which_kinds_it_has(tokenizer: Any) -> None:
    with pytest.raises(DatasetError, match=r"hh_rlhf has no rows of kind 'sft'; expected dpo or rw"):
        get_custom_dataset("hh_rlhf", kind="sft", tokenizer=tokenizer)


def test_torl_data_gives_gold_answers_that_math_verify_takes(tmp_path: Path, tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "half of 7?"}]
    folder = write(tmp_path, {"prompt": talk, "reward_model": {"ground_truth": "7/2", "style": "rule"}})
    row = get_torl_data_rl_dataset(folder, "train")[0]
    assert row["messages"] == talk
    score = get_reward_fn("math_verify")
    assert score(None, r"\boxed{3.5}", None, None, answer=row["answer"]) == 1.0
    assert score(None, r"\boxed{1/2}", None, None, answer=row["answer"]) == 0.0
    (example,) = get_custom_dataset("torl_data", kind="sft", tokenizer=tokenizer, data_dir=folder)
    answer = [i for i, mark in zip(example["input_ids"], example["loss_mask"], strict=True) if mark]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == r"\boxed{7/2}"
    write(tmp_path, {"prompt": talk, "reward_model": {"style": "rule"}})
    with pytest.raises(DatasetError, match=r"train\.jsonl:1: 'reward_model' must hold 'ground_truth'"):
        get_torl_data_rl_dataset(folder, "train")
