"""gsm8k: word problems of grade school (Cobbe et al. 2021, arXiv:2110.14168), from `train.jsonl` and `test.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.data.mapping import RowDataset, rl_dataset, sft_dataset
from archon.data.sources import data_folder, read_rows

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def get_gsm8k_rl_dataset(
    split: str = "train",
    path: str | Path | None = None,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    system_prompt: str | None = None,
    instruction: str | None = INSTRUCTION,
) -> RowDataset:
    """RL rows; `answer` is the worked solution as the set has it, which ends in `#### <number>`.

    Args:
        split: "train" (7,473 rows) or "test" (1,319).
        path: The folder of the two files; without it, where `data_folder` looks.
        tokenizer: Needed for `max_length`, the longest prompt in tokens.
        instruction: Put behind the question.
    """
    source = read_rows(data_folder("gsm8k", path), split)
    return rl_dataset(
        source,
        f"gsm8k[{split}]",
        prompt_key="question",
        response_key="answer",
        system_prompt=system_prompt,
        instruction=instruction,
        tokenizer=tokenizer,
        max_length=max_length,
    )


def get_gsm8k_sft_dataset(
    split: str = "train",
    path: str | Path | None = None,
    *,
    tokenizer: Any,
    max_length: int | None = None,
    system_prompt: str | None = None,
    instruction: str | None = None,
) -> RowDataset:
    """SFT rows: the question, then the worked solution as it stands, which is trained."""
    source = read_rows(data_folder("gsm8k", path), split)
    return sft_dataset(
        source,
        f"gsm8k[{split}]",
        tokenizer=tokenizer,
        prompt_key="question",
        response_key="answer",
        system_prompt=system_prompt,
        instruction=instruction,
        max_length=max_length,
    )
