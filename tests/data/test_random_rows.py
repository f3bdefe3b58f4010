"""Random rows: each is read or refused with a message, none is lost, and only answers are trained."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from archon.data import get_custom_dataset
from archon.schema.errors import UserError
from tests.cli.random_data import mutate
from tests.data.test_encoding import trained_text_of
from tests.data.toy_tokenizers import CHATML, THINKING, toy_tokenizer

USER, ANSWER = {"role": "user", "content": "QUESTION one"}, {"role": "assistant", "content": "reply"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROWS: dict[str, list[Any]] = {
    "sft": [
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "9"},
            ]
        },
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"reasoning_content": "hm"}]},
        {"conversations": [{"from": "human", "value": "QUESTION"}, {"from": "gpt", "value": "reply"}]},
        {"prompt": "QUESTION", "response": "reply"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"text": "reply"},
        {"instruction": "QUESTION", "input": "QUESTION", "output": "reply"},
    ],
    "dpo": [
        {"prompt": "QUESTION", "chosen": "reply", "rejected": "worse"},
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        {"question": "QUESTION", "chosen": "reply", "rejected": "worse"},
        {"chosen": "\n\nHuman: QUESTION\n\nAssistant: reply", "rejected": "\n\nHuman: QUESTION\n\nAssistant: worse"},
    ],
    "rl": [
        {"prompt": "QUESTION", "answer": "reply"},
        {"messages": [USER, ANSWER]},
        {"instruction": "QUESTION", "output": "reply", "history": [["QUESTION", "reply"]]},
        {"prompt": [USER], "response": 5, "reward_model": {"ground_truth": "5"}},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, THINKING, None], ids=["chatml", "thinking", "plain"])
@pytest.mark.parametrize("kind", ROWS)
def test_random_rows_are_read_or_refused(kind: Any, template: str | None, tmp_path: Path) -> None:
    draw, tokenizer = random.Random(f"{kind}{template}"), toy_tokenizer(template)
    accepted = 0
    for _ in range(170):
        base, rows = draw.choice(ROWS[kind]), list[Any]()
        for _ in range(draw.randint(1, 3)):
            row = base
            for _ in range(draw.choice([0, 1, 1, 2, 3])):
                row = mutate(row, draw)
            rows += [row] * draw.randint(1, 2)
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        limit, bad_rows = draw.choice([None, None, 30]), draw.choice(["refuse", "skip", "skip"])
        try:
            dataset = get_custom_dataset(path, kind=kind, tokenizer=tokenizer, max_length=limit, bad_rows=bad_rows)
        except UserError:
            continue
        accepted += 1
        assert len(dataset) + dataset.n_filtered + dataset.n_skipped == len(rows)
        assert bad_rows == "skip" or not dataset.n_skipped
        for encoded in dataset:
            for ids, mask in (("input_ids", "loss_mask"), ("chosen_ids", "chosen_loss_mask")):
                if ids in encoded:
                    text = trained_text_of(tokenizer, {"input_ids": encoded[ids], "loss_mask": encoded[mask]})
                    assert "QUESTION" not in text and text
    assert accepted > 25
