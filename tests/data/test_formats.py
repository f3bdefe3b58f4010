"""Public row formats are read as their authors mean them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.chat_template import set_template_variables
from archon.data import get_custom_dataset
from archon.schema.errors import DatasetError
from tests.data.test_encoding import trained_text_of
from tests.data.toy_tokenizers import ALTERNATING, CHATML, OPEN_THINKING, toy_tokenizer

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
        {"conversations": [{"from": "user", "value": "How many?"}, {"from": "bing", "value": "12"}]},
        {"messages": [{"role": "human", "content": "How many?"}, {"role": "gpt", "value": "12"}]},
        {"prompt": "How many?", "response": "12"},
        {"prompt": "How many?", "completion": "12"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "completion": "12"},
        {"instruction": "How many?", "input": "", "output": "12"},
        {"question": "How many?", "answer": "12"},
        {"query": "How many?", "response": "12"},
        {"instruction": "How many?", "context": "", "response": "12"},
        {"instruction": "How many?", "input": float("nan"), "output": "12", "history": ""},
    ],
)
def test_sft_rows_of_every_format_train_the_answer(tmp_path: Path, row: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer, rows = read(tmp_path, "sft", row, row)
    assert tokenizer.decode(rows[0]["input_ids"]) == TEXT
    assert trained_text_of(tokenizer, rows[0]) == "12<|im_end|>"
    assert ({"prompt", "response"} <= row.keys()) == (not caplog.messages)


@pytest.mark.parametrize(
    ("turns", "trained", "note"),
    [
        ([GPT, HUMAN, GPT], "12<|im_end|>", "1 start with an assistant turn, which has no prompt and is not trained"),
        ([HUMAN, GPT, HUMAN], "12<|im_end|>", "1 end with a user turn, which has no answer"),
        ([HUMAN, GPT, HUMAN, GPT | {"value": ""}], "12<|im_end|><|im_end|>", "1 have an empty assistant turn"),
        ([HUMAN, HUMAN, GPT], "12<|im_end|>", "1 have two turns of one role in succession"),
    ],
)
def test_unusual_turns_are_counted(tmp_path: Path, turns: Any, trained: str, note: str, caplog: Any) -> None:
    tokenizer, rows = read(tmp_path, "sft", {"conversations": turns}, {"conversations": [HUMAN, GPT]})
    assert trained_text_of(tokenizer, rows[0]) == trained
    assert tokenizer.decode(rows[0]["input_ids"]).count("<|im_start|>") == len(turns)
    assert f"of 2 conversations, {note}" in caplog.text


def test_a_template_that_refuses_an_assistant_turn_at_the_start_leaves_a_choice(tmp_path: Path, caplog: Any) -> None:
    tokenizer = toy_tokenizer(ALTERNATING)
    rows = [{"conversations": [GPT, HUMAN, GPT]}, {"conversations": [HUMAN, GPT]}]
    with pytest.raises(DatasetError, match=r"rows.jsonl:1: .* roles must alternate.*set bad_rows to skip"):
        read(tmp_path, "sft", *rows, tokenizer=tokenizer)
    _, dataset = read(tmp_path, "sft", *rows, tokenizer=tokenizer, bad_rows="skip")
    assert (len(dataset), dataset.n_skipped) == (1, 1)
    assert "skipped 1 of 2 rows that cannot be used: 1: the chat template refuses" in caplog.text


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("sft", {"conversations": [HUMAN, GPT]}, [{"conversations": []}, {"conversations": [HUMAN]}, {"id": 1}]),
        ("sft", {"prompt": "a", "response": "b"}, [{"prompt": "a", "response": ""}, {"prompt": "a"}]),
        (
            "sft",
            {"prompt": "a", "completion": "b", "label": True},
            [{"prompt": "a", "completion": "b", "label": False}],
        ),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, [{"prompt": "a", "chosen": "b"}]),
        (
            "dpo",
            {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
            [{"chosen": [USER, ANSWER], "rejected": [USER]}],
        ),
        ("rl", {"conversations": [HUMAN]}, [{"conversations": [{"from": "zz", "value": "x"}]}, {"conversations": 5}]),
        ("rl", {"prompt": [USER], "answer": "12"}, [{"prompt": [USER, ANSWER], "answer": "12"}, {"answer": "12"}]),
    ],
)
def test_bad_rows_end_the_run_or_are_skipped_and_counted(
    tmp_path: Path, kind: str, good: Any, bad: list[Any], caplog: Any
) -> None:
    rows = [good, *bad, good, *bad]
    with pytest.raises(DatasetError, match=r"rows.jsonl:2: .*; to leave such rows out, set bad_rows to skip"):
        read(tmp_path, kind, *rows)
    _, dataset = read(tmp_path, kind, *rows, bad_rows="skip")
    assert (len(dataset), dataset.n_skipped) == (2, 2 * len(bad))
    assert f"skipped {2 * len(bad)} of {len(rows)} rows that cannot be used: 2: " in caplog.text
    assert dataset.rows[0] == dataset.rows[1]
    _, dataset = read(tmp_path, kind, {"id": 1}, *rows, bad_rows="skip")
    assert (len(dataset), dataset.n_skipped) == (2, 2 * len(bad) + 1)
    with pytest.raises(DatasetError, match=r"none of the 1 rows can be used; the first is .*rows.jsonl:1"):
        read(tmp_path, kind, {**good, **bad[0]} if kind != "dpo" else bad[0] | {"rejected": ""}, bad_rows="skip")


def test_the_turns_before_a_completion_are_not_trained(tmp_path: Path) -> None:
    for completion in ("12", [ANSWER]):
        tokenizer, (row,) = read(tmp_path, "sft", {"prompt": [USER, WORSE, USER], "completion": completion})
        assert trained_text_of(tokenizer, row) == "12<|im_end|>"
    pair = {"prompt": [USER], "chosen": [WORSE, USER, ANSWER], "rejected": [WORSE, USER, WORSE]}
    tokenizer, (row,) = read(tmp_path, "dpo", pair)
    assert tokenizer.decode(row["chosen_ids"]) == TEXT.replace("12", "30") + TEXT


def test_the_history_of_an_instruction_comes_before_it(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1+2", "output": "3", "history": [["How many?", "12"]]}
    tokenizer, (encoded,) = read(tmp_path, "sft", row)
    assert tokenizer.decode(encoded["input_ids"]).startswith(TEXT + "<|im_start|>user\nAdd.\n\n1+2<|im_end|>")
    assert trained_text_of(tokenizer, encoded) == "12<|im_end|>3<|im_end|>"
    _, (read_row,) = read(tmp_path, "rl", row)
    assert read_row["messages"] == [USER, ANSWER, {"role": "user", "content": "Add.\n\n1+2"}]


def test_every_input_of_an_instruction_is_read(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": 0, "context": "Use decimals.", "output": "3"}
    tokenizer, (encoded,) = read(tmp_path, "sft", row)
    assert "user\nAdd.\n\n0\n\nUse decimals.<|im_end|>" in tokenizer.decode(encoded["input_ids"])


def test_the_turns_of_a_nested_column_are_read(tmp_path: Path) -> None:
    row = {"chat": {"turns": [USER, ANSWER]}}
    tokenizer, (encoded,) = read(tmp_path, "sft", row, prompt_key="chat.turns", response_key=None)
    assert tokenizer.decode(encoded["input_ids"]) == TEXT
    with pytest.raises(DatasetError, match="nothing to train on: the conversation has no assistant turn"):
        read(tmp_path, "sft", {"chat": "How many?"}, prompt_key="chat", response_key=None)


def test_calls_are_read_whatever_the_case_of_their_role(tmp_path: Path) -> None:
    call = {"from": "Function_Call", "value": '{"name": "f", "arguments": {}}'}
    with pytest.raises(DatasetError, match="does not render 'tool_calls'"):
        read(tmp_path, "sft", {"conversations": [HUMAN, call]})


def test_columns_that_are_not_used_are_named_in_every_row_and_format(tmp_path: Path, caplog: Any) -> None:
    read(tmp_path, "sft", {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b", "labels": [1]})
    read(tmp_path, "sft", {"q": "a", "extra": {"a": "b"}, "topic": "c"}, prompt_key="q", response_key="extra.a")
    assert "not used: labels" in caplog.text and "not used: topic" in caplog.text


@pytest.mark.parametrize(
    ("template", "warning"),
    [
        (OPEN_THINKING, "set chat_template_kwargs={enable_thinking: false}"),
        (OPEN_THINKING.replace("enable_thinking", "other"), "use a template that does not open thinking"),
        (CHATML, None),
    ],
)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_prompt_that_opens_thinking_without_thinking_in_the_rows_is_told(
    tmp_path: Path, kind: str, template: str, warning: str | None, caplog: Any
) -> None:
    tokenizer = toy_tokenizer(template)

    def warned(answer: str) -> bool:
        caplog.clear()
        row = {"prompt": "a", "response": answer, "chosen": answer, "rejected": "c"}
        read(tmp_path, kind, row, tokenizer=tokenizer)
        return "ends with <think>, but no row has thinking" in caplog.text and str(warning) in caplog.text

    assert warned("b") == (warning is not None)
    if template == OPEN_THINKING:
        assert not warned("<think>\nhm\n</think>\n\nb")
        set_template_variables(tokenizer, {"enable_thinking": False})
        assert not warned("b")


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
    assert "reading 1 instructions with outputs" in caplog.text and "not used: source" in caplog.text
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
        {"prompt": "How many? \n", "chosen": [USER, ANSWER], "rejected": [USER, WORSE], "messages": [USER, ANSWER]},
        {"chosen": "\n\nHuman: How many?\n\nAssistant: 12", "rejected": "\n\nHuman: How many?\n\nAssistant: 30"},
        {"question": "How many?", "chosen": "12", "rejected": "30"},
        {"instruction": "How many?", "input": "", "chosen": "12", "rejected": "30"},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "30"}},
        {"messages": [USER], "chosen": "12", "rejected": "30"},
    ],
)
def test_pairs_of_every_format_compare_the_answers(tmp_path: Path, row: Any) -> None:
    tokenizer, (pair,) = read(tmp_path, "dpo", row)
    assert tokenizer.decode(pair["chosen_ids"]) == TEXT
    assert tokenizer.decode(pair["rejected_ids"]) == TEXT.replace("12", "30")
    masked = {"input_ids": pair["rejected_ids"], "loss_mask": pair["rejected_loss_mask"]}
    assert trained_text_of(tokenizer, masked) == "30<|im_end|>"


def test_without_a_chat_template_a_transcript_keeps_its_markers(tmp_path: Path) -> None:
    before = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How many?"
    row = {"chosen": f"{before}\n\nAssistant: 12", "rejected": f"{before}\n\nAssistant: 30"}
    tokenizer, (pair,) = read(tmp_path, "dpo", row, tokenizer=toy_tokenizer(None))
    assert tokenizer.decode(pair["chosen_ids"]) == f"{before}\n\nAssistant: 12<|im_end|>"
    masked = {"input_ids": pair["rejected_ids"], "loss_mask": pair["rejected_loss_mask"]}
    assert trained_text_of(tokenizer, masked) == " 30<|im_end|>"
    options = {"tokenizer": toy_tokenizer(None), "instruction": "Box it.", "system_prompt": "Be brief."}
    _, (pair,) = read(tmp_path, "dpo", row, **options)
    assert tokenizer.decode(pair["chosen_ids"]) == f"Be brief.\n{before}\nBox it.\n\nAssistant: 12<|im_end|>"


def test_pairs_with_two_identical_answers_are_counted(tmp_path: Path, caplog: Any) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    read(tmp_path, "dpo", pair, pair | {"rejected": "b"})
    assert "1 of 2 pairs have two identical answers" in caplog.text


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
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": ["f"]}]}, ["f"]),
        ({"prompt": "How many?", "answer": float("nan")}, None),
        ({"prompt": "How many?", "answer": ["12", 12]}, ["12", 12]),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "12"}]}]}, "12"),
        ({"prompt": [USER], "completion": [ANSWER]}, "12"),
        ({"prompt": [USER], "answer": [{"input": "a"}]}, [{"input": "a"}]),
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
        ("sft", {"input_ids": [1, 2], "loss_mask": [0, "x"]}, "'loss_mask' is .*; expected a list of whole numbers"),
        ("sft", {"input_ids": 5, "loss_mask": [1]}, "'input_ids' is 5; expected a list of whole numbers"),
        ("sft", {"messages": []}, "'messages' is .*; expected a list of messages"),
        ("sft", {"conversations": [{"from": "narrator", "value": "x"}]}, "a turn is from 'narrator'; expected one of"),
        ("sft", {"messages": [USER, {"role": "assistant", "content": 5}]}, "must be a string or a list of messages"),
        ("sft", {"instruction": 5, "output": "x"}, "'instruction' is 5; expected an instruction in one"),
        ("sft", {"instruction": "a", "output": "b", "history": [["c"]]}, "'history' holds"),
        ("sft", {"prompt": "a", "completion": "b", "label": False}, "'label' is false, which marks an unwanted answer"),
        ("sft", {"prompt": "a", "response": "b", "label": "False"}, "'label' is false, which marks an unwanted answer"),
        ("sft", {"instruction": "a", "input": {"b": 1}, "output": "c"}, "'input' is {'b': 1}; expected the input"),
        ("rl", {"prompt": [USER, ANSWER]}, "the prompt ends with an assistant turn"),
        ("rl", {"messages": [USER, ANSWER, ANSWER]}, "the prompt ends with an assistant turn"),
        ("dpo", {"prompt": "a", "completion": "b", "label": True}, "expected the columns chosen and rejected"),
        ("dpo", {"prompt": "a", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, "does not contain 'prompt', 'a'"),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "has the content part"),
        ("rl", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has the content part"),
        ("dpo", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, WORSE]}, "differ before their last turns"),
    ],
)
def test_a_row_of_no_format_is_an_error(tmp_path: Path, kind: str, row: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read(tmp_path, kind, row)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(
    "column",
    [
        {"weight": 0.5},
        {"mask": [0, 1]},
        {"loss_mask": [0, 1]},
        {"history": [["a", "b"]]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"images": ["a.png"]},
        {"video": "a.mp4"},
    ],
)
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
