"""GSM8K: grade-school math word problems (Cobbe et al. 2021, arXiv:2110.14168), from `train.jsonl` and `test.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.data.mapping import RowDataset, rl_dataset, sft_dataset
from archon.data.sources import data_folder, read_rows

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_KEYS: dict[str, Any] = {"prompt_key": "question", "response_key": "answer"}


def get_gsm8k_rl_dataset(
    split: str = "train", path: str | Path | None = None, *, instruction: str | None = INSTRUCTION, **options: Any
) -> RowDataset:
    """Returns RL rows; `answer` is the dataset's worked solution, which ends in `#### <number>`.

    Args:
        split: "train" (7,473 rows) or "test" (1,319).
        path: The folder of the two files; by default that of `data_folder`.
        instruction: Appended to the question.
        options: Of `rl_dataset`: system_prompt, tokenizer, max_length.
    """
    source = read_rows(data_folder("gsm8k", path), split)
    return rl_dataset(source, f"gsm8k[{split}]", **_KEYS, instruction=instruction, **options)


def get_gsm8k_sft_dataset(
    split: str = "train", path: str | Path | None = None, *, tokenizer: Any, **options: Any
) -> RowDataset:
    """Returns SFT rows: the question, then the worked solution, which is trained.

    `options` are those of `sft_dataset`: system_prompt, instruction, max_length.
    """
    source = read_rows(data_folder("gsm8k", path), split)
    return sft_dataset(source, f"gsm8k[{split}]", tokenizer=tokenizer, **_KEYS, **options)
