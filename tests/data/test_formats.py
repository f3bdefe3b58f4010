"""Public row formats are read as their authors mean them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from archon.data import get_custom_dataset
from archon.schema.errors import DatasetError
from tests.data.test_encoding import trained_text_of
from tests.data.toy_tokenizers import CHATML, toy_tokenizer

USER, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "12"}
WORSE = {"role": "assistant", "content": "30"}
HUMAN, GPT = {"from": "human", "value": "How many?"}, {"from": "gpt", "value": "12"}
TEXT = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n"


def read(tmp_path: Path, kind: Any, *rows: Any, **options: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tokenizer = options.pop("tokenizer", toy_tokenizer(CHATML))
    return tokenizer, get_custom_dataset(tmp_path / "rows.jsonl", kind=kind, tokenizer=tokenizer, **options)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}, ANSWER]},
        {"conversations": [HUMAN, GPT]},
        {"conversations": json.dumps([HUMAN, GPT])},
        {"conversation": [USER, ANSWER]},
        {"prompt": "How many?", "response": "12"},
        {"prompt": "How many?", "completion": "12"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "How many?", "input": "", "output": "12"},
        {"question": "How many?", "answer": "12"},
    ],
)
def test_sft_rows_of_every_format_train_the_answer(tmp_path: Path, row: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer, rows = read(tmp_path, "sft", row, row)
    assert tokenizer.decode(rows[0]["input_ids"]) == TEXT
    assert trained_text_of(tokenizer, rows[0]) == "12<|im_end|>"
    assert ("response" in row) == (not caplog.messages)


def test_the_turns_of_a_prompt_are_not_trained_and_a_system_column_is_used(tmp_path: Path) -> None:
    tokenizer, rows = read(tmp_path, "sft", {"prompt": [USER, WORSE, USER], "completion": [ANSWER]})
    assert trained_text_of(tokenizer, rows[0]) == "12<|im_end|>"
    _, rows = read(tmp_path, "sft", {"system": "Be brief.", "conversations": [HUMAN, GPT]})
    assert tokenizer.decode(rows[0]["input_ids"]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_the_input_of_an_instruction_and_a_system_column_are_read_in_every_kind(tmp_path: Path, caplog: Any) -> None:
    row = {"system": "Be brief.", "instruction": "Add.", "input": "1+2", "output": "3", "source": "x"}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add.\n\n1+2"}]
    _, (read_row,) = read(tmp_path, "rl", row)
    assert (read_row["messages"], read_row["answer"], read_row["output"]) == (asked, "3", "3")
    tokenizer, (encoded,) = read(tmp_path, "sft", row)
    assert "Be brief.<|im_end|>\n<|im_start|>user\nAdd.\n\n1+2<|im_end|>" in tokenizer.decode(encoded["input_ids"])
    assert "1 instructions with outputs; not used: source" in caplog.text
    _, (pair,) = read(tmp_path, "dpo", {"system": "Be brief.", "prompt": "a", "chosen": "b", "rejected": "c"})
    assert tokenizer.decode(pair["chosen_ids"]).startswith("<|im_start|>system\nBe brief.")


def test_a_worked_solution_is_trained_and_an_answer_is_the_gold_of_rl(tmp_path: Path) -> None:
    row = {"problem": "1+2", "solution": "It is 3.", "answer": "3"}
    tokenizer, (encoded,) = read(tmp_path, "sft", row)
    assert trained_text_of(tokenizer, encoded) == "It is 3.<|im_end|>"
    _, (read_row,) = read(tmp_path, "rl", row)
    assert (read_row["answer"], read_row["solution"]) == ("3", "It is 3.")


def test_plain_text_trains_every_token(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(None, bos="<s>")
    _, rows = read(tmp_path, "sft", {"text": "There are 12."}, tokenizer=tokenizer)
    assert tokenizer.decode(rows[0]["input_ids"]) == "<s>There are 12.<|im_end|>"
    assert rows[0]["loss_mask"] == [0] + [1] * (len(rows[0]["input_ids"]) - 1)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "chosen": "12", "rejected": "30"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
        {"prompt": "How many?", "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        {"prompt": "How many?", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        {"chosen": "\n\nHuman: How many?\n\nAssistant: 12", "rejected": "\n\nHuman: How many?\n\nAssistant: 30"},
    ],
)
def test_pairs_of_every_format_compare_the_answers(tmp_path: Path, row: Any) -> None:
    tokenizer, (pair,) = read(tmp_path, "dpo", row)
    assert tokenizer.decode(pair["chosen_ids"]) == TEXT
    assert tokenizer.decode(pair["rejected_ids"]) == TEXT.replace("12", "30")
    masked = {"input_ids": pair["rejected_ids"], "loss_mask": pair["rejected_loss_mask"]}
    assert trained_text_of(tokenizer, masked) == "30<|im_end|>"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "How many?"}, None),
        ({"prompt": [USER], "response": "12"}, "12"),
        ({"prompt": "How many?", "answer": 12}, "12"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "12", "style": "rule"}}, "12"),
        ({"messages": [USER]}, None),
        ({"messages": [USER, ANSWER]}, "12"),
        ({"messages": [USER, WORSE], "solution": "12"}, "12"),
        ({"problem": "How many?", "solution": "12"}, "12"),
        ({"conversations": [HUMAN]}, None),
    ],
)
def test_rl_rows_of_every_format_have_a_prompt_and_perhaps_an_answer(tmp_path: Path, row: Any, answer: Any) -> None:
    _, (read_row,) = read(tmp_path, "rl", row)
    assert read_row["messages"] == [USER] and read_row.get("answer") == answer


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("sft", {"q": "a", "a": "b"}, "columns 'q', 'a' belong to no known format; expected prompt and response"),
        ("sft", {"prompt": "a"}, "belong to no known format"),
        ("dpo", {"prompt": "a", "chosen": "b"}, "expected the columns chosen and rejected"),
        ("rl", {"q": "a"}, "expected a prompt"),
        ("sft", {"messages": []}, "'messages' is .*; expected a list of messages"),
        ("sft", {"conversations": [{"from": "narrator", "value": "x"}]}, "a turn is from 'narrator'; expected one of"),
        ("sft", {"messages": [USER, {"role": "assistant", "content": 5}]}, "must be a string or a list of messages"),
        ("sft", {"instruction": 5, "output": "x"}, "'instruction' is 5; expected an instruction in one"),
        ("sft", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' is"),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "has the content part"),
        ("rl", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has the content part"),
        ("dpo", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, WORSE]}, "differ before their last turns"),
    ],
)
def test_a_row_of_no_format_is_an_error(tmp_path: Path, kind: str, row: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read(tmp_path, kind, row)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("column", [{"weight": 0.5}, {"mask": [0, 1]}, {"images": ["a.png"]}, {"video": "a.mp4"}])
def test_a_column_that_training_would_have_to_honor_is_named(tmp_path: Path, kind: str, column: Any) -> None:
    row = (
        {"prompt": "How many?", "response": "12"} if kind == "sft" else {"prompt": "a", "chosen": "b", "rejected": "c"}
    )
    assert len(read(tmp_path, kind, row | dict.fromkeys(column))[1]) == 1
    with pytest.raises(DatasetError, match=f"column '{next(iter(column))}'"):
        read(tmp_path, kind, row | column)


def test_an_rl_row_with_images_for_a_text_model_is_told(tmp_path: Path, caplog: Any) -> None:
    read(tmp_path, "rl", {"prompt": "How many?", "images": ["a.png"]}, {"prompt": "b", "images": None})
    assert "the model reads no images; column 'images'" in caplog.text


def test_a_long_conversation_is_cut_after_a_whole_turn(tmp_path: Path) -> None:
    from archon.data.encoding import TurnOptions

    talk = {"messages": [USER, ANSWER] * 4}
    tokenizer, (row,) = read(tmp_path, "sft", talk)
    turn = len(row["input_ids"]) // 4
    cut = TurnOptions(long_rows="truncate")
    _, (row,) = read(tmp_path, "sft", talk, max_length=3 * turn - 1, turns=cut)
    assert tokenizer.decode(row["input_ids"]) == (TEXT * 3).removesuffix("\n")
    _, (row,) = read(tmp_path, "sft", talk, max_length=2 * turn + 3, turns=cut)
    assert tokenizer.decode(row["input_ids"]) == (TEXT * 2).removesuffix("\n")


def test_the_separator_of_plain_text_is_kept_with_the_tokenizer(tmp_path: Path) -> None:
    from archon.checkpoint.chat_template import set_prompt_separator
    from archon.checkpoint.tokenizer import load_tokenizer, write_tokenizer
    from archon.data import encode_prompt

    tokenizer = toy_tokenizer(None)
    set_prompt_separator(tokenizer, "\n")
    write_tokenizer(tmp_path, tokenizer, None)
    again = load_tokenizer(tmp_path)
    _, (row,) = read(tmp_path, "sft", {"prompt": "12+34=", "response": "46"}, tokenizer=again)
    assert again.decode(row["input_ids"]) == "12+34=\n46<|im_end|>"
    prompt = encode_prompt(again, {"prompt": "12+34="})
    assert row["input_ids"][: len(prompt)] == prompt and again.decode(prompt) == "12+34=\n"
    with pytest.raises(DatasetError, match="the tokenizer was used with"):
        set_prompt_separator(again, " ")
    with pytest.raises(DatasetError, match="has a chat template"):
        set_prompt_separator(toy_tokenizer(CHATML), " ")
