"""torl_data: mathematics of the ToRL project (Li et al. 2025, arXiv:2503.23383), from `train` and `test.parquet`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archon.data.mapping import RowDataset, column, rl_dataset, sft_dataset
from archon.data.sources import SourceRow, data_folder, read_rows
from archon.schema.errors import DatasetError


def get_torl_data_rl_dataset(
    split: str = "train",
    path: str | Path | None = None,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    system_prompt: str | None = None,
    instruction: str | None = None,
) -> RowDataset:
    r"""RL rows; `answer` is `\boxed{…}` around the set's `reward_model.ground_truth`, as math_verify takes it.

    Args:
        split: "train" or "test".
        path: The folder of the two files; without it, where `data_folder` looks.
        tokenizer: Needed for `max_length`, the longest prompt in tokens.
    """
    return rl_dataset(
        _rows(split, path),
        f"torl_data[{split}]",
        prompt_key="prompt",
        response_key="answer",
        system_prompt=system_prompt,
        instruction=instruction,
        tokenizer=tokenizer,
        max_length=max_length,
    )


def get_torl_data_sft_dataset(
    split: str = "train",
    path: str | Path | None = None,
    *,
    tokenizer: Any,
    max_length: int | None = None,
    system_prompt: str | None = None,
    instruction: str | None = None,
) -> RowDataset:
    r"""SFT rows: the problem, then `\boxed{…}` around the gold answer, as the set has no worked solutions."""
    return sft_dataset(
        _rows(split, path),
        f"torl_data[{split}]",
        tokenizer=tokenizer,
        prompt_key="prompt",
        response_key="answer",
        system_prompt=system_prompt,
        instruction=instruction,
        max_length=max_length,
    )


def _rows(split: str, path: str | Path | None) -> list[SourceRow]:
    source = read_rows(data_folder("torl_data", path), split)
    return [SourceRow(row.where, row.data | {"answer": _answer(row)}) for row in source]


def _answer(row: SourceRow) -> str:
    given = column(row, "reward_model")
    if not isinstance(given, Mapping) or given.get("ground_truth") in (None, ""):
        raise DatasetError(f"{row.where}: 'reward_model' must hold 'ground_truth', got {given!r:.80}")
    return rf"\boxed{{{given['ground_truth']}}}"
