"""geometry3k and clevr_count_70k, in files with their columns on the hub: the text, and no image lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archon.data import (
    get_clevr_count_70k_rl_dataset,
    get_clevr_count_70k_sft_dataset,
    get_custom_dataset,
    get_geometry3k_rl_dataset,
    get_geometry3k_sft_dataset,
)
from archon.rl.rewards import get_reward_fn
from archon.schema.errors import DatasetError, TokenizerError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer

ROWS: dict[str, dict[str, Any]] = {
    "geometry3k": {"images": [{"bytes": "…"}], "problem": "<image>Find x.", "answer": "7 \\sqrt { 3 }", "id": 1},
    "clevr_count_70k": {"images": [{"bytes": "…"}], "problem": "<image>How many items are there?", "answer": "3"},
}
LOADERS: dict[str, Any] = {
    "geometry3k": (get_geometry3k_rl_dataset, get_geometry3k_sft_dataset),
    "clevr_count_70k": (get_clevr_count_70k_rl_dataset, get_clevr_count_70k_sft_dataset),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in ROWS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", LOADERS)
def test_the_text_is_read_and_the_images_are_said_to_be_left_out(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = toy_tokenizer(CHATML)
    rl, sft = LOADERS[name]
    (row,) = rl(folder / name, "train", SimpleNamespace(tokenizer=tokenizer), 200)
    assert f"{name}[train]: omitting the images of 1 rows" in caplog.text
    question = row["messages"][0]["content"]
    assert question.startswith(ROWS[name]["problem"].removeprefix("<image>")) and "\n" in question
    assert row["answer"] == ROWS[name]["answer"] and "images" not in row
    (example,) = sft(folder / name, "train", processor=SimpleNamespace(tokenizer=tokenizer))
    trained = [token for token, mask in zip(example["input_ids"], example["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(trained) == row["answer"] + "<|im_end|>"
    assert get_custom_dataset(name, data_dir=folder / name).rows == [row]


@pytest.mark.parametrize(("name", "stated"), [("geometry3k", r"\boxed{7√3}"), ("clevr_count_70k", "There are [3]")])
def test_their_rewards_take_their_answers(name: str, stated: str, folder: Path) -> None:
    (row,) = get_custom_dataset(name, data_dir=folder / name)
    score = get_reward_fn(name)
    assert score(None, stated, None, None, answer=row["answer"]) == 1.0
    assert score(None, stated.replace("3", "4"), None, None, answer=row["answer"]) == 0.0


def test_what_they_cannot_read_is_named(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="SFT rows of geometry3k are token ids: pass a tokenizer"):
        get_geometry3k_sft_dataset(folder / "geometry3k", "train")
    (folder / "geometry3k" / "test.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(DatasetError, match=r"test\.jsonl:1: no key 'problem'; the row has: 'question'"):
        get_geometry3k_rl_dataset(folder / "geometry3k", split="test")
