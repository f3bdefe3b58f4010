"""torl_data: math problems of ToRL (Li et al. 2025, arXiv:2503.23383), from `train.parquet` and `test.parquet`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archon.data.mapping import RowDataset, require_column, rl_dataset, sft_dataset
from archon.data.sources import SourceRow, data_folder, read_rows
from archon.schema.errors import DatasetError

_KEYS: dict[str, Any] = {"prompt_key": "prompt", "response_key": "answer"}


def get_torl_data_rl_dataset(split: str = "train", path: str | Path | None = None, **options: Any) -> RowDataset:
    r"""Returns RL rows; `answer` is `\boxed{…}` around the dataset's `reward_model.ground_truth`, for math_verify.

    Args:
        split: "train" or "test".
        path: The folder of the two files; by default that of `data_folder`.
        options: Of `rl_dataset`: system_prompt, instruction, tokenizer, max_length.
    """
    return rl_dataset(_rows(split, path), f"torl_data[{split}]", **_KEYS, **options)


def get_torl_data_sft_dataset(
    split: str = "train", path: str | Path | None = None, *, tokenizer: Any, **options: Any
) -> RowDataset:
    r"""Returns SFT rows: the problem, then `\boxed{…}` around the gold answer (there are no worked solutions).

    `options` are those of `sft_dataset`: system_prompt, instruction, max_length.
    """
    return sft_dataset(_rows(split, path), f"torl_data[{split}]", tokenizer=tokenizer, **_KEYS, **options)


def _rows(split: str, path: str | Path | None) -> list[SourceRow]:
    source = read_rows(data_folder("torl_data", path), split)
    return [SourceRow(row.where, row.data | {"answer": _answer(row)}) for row in source]


def _answer(row: SourceRow) -> str:
    given = require_column(row, "reward_model")
    if not isinstance(given, Mapping) or given.get("ground_truth") in (None, ""):
        raise DatasetError(f"{row.where}: 'reward_model' must hold 'ground_truth', got {given!r:.80}")
    return rf"\boxed{{{given['ground_truth']}}}"
