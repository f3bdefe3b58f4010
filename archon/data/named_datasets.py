"""The named datasets of prompts with answers: arithmetic, gsm8k and torl_data.

File-based datasets take `(path, split, tokenizer, max_length)` by position. `path` is the directory of a dataset's
files, a file, or a name on the hub; by default the directory of `data_folder`. `options` are passed to `rl_dataset` and
`sft_dataset`: system_prompt, instruction.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archon.data.mapping import require_column, rl_dataset, sft_dataset
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow, data_folder, open_rows
from archon.schema.errors import DatasetError, TokenizerError

N_HELD_OUT = 1000
_RANGE = 100
_ARITHMETIC_KEYS: dict[str, Any] = {"prompt_key": "sum", "response_key": "answer"}

GSM8K_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_GSM8K_KEYS: dict[str, Any] = {"prompt_key": "question", "response_key": "answer"}
_TORL_KEYS: dict[str, Any] = {"prompt_key": "prompt", "response_key": "answer"}


def get_arithmetic_rl_dataset(split: str = "train", *, seed: int = 0, **options: Any) -> RowDataset:
    """Return RL rows: `prompt` "12+34=", the same as one user message in `messages`, and `answer` "46".

    `seed` determines the split and the order; see `arithmetic_pairs`.
    """
    return rl_dataset(_sums(split, seed), f"arithmetic[{split}]", **_ARITHMETIC_KEYS, **options)


def get_arithmetic_sft_dataset(split: str = "train", *, tokenizer: Any, seed: int = 0, **options: Any) -> RowDataset:
    """Return SFT rows: "12+34=", then "46" and an end token, which are trained."""
    rows = _sums(split, seed)
    return sft_dataset(rows, f"arithmetic[{split}]", tokenizer=tokenizer, **_ARITHMETIC_KEYS, **options)


def arithmetic_pairs(split: str = "train", seed: int = 0) -> list[tuple[int, int]]:
    """Return the pairs (a, b) of a split, a and b in 0–99, shuffled by `seed`: "train" has 9,000, "test" 1,000.

    A pair is held out together with its mirror image, so that a model evaluated on 12+34 was not trained on 34+12.
    """
    if split not in ("train", "test"):
        raise DatasetError(f"split is {split!r}; expected 'train' or 'test' of the arithmetic dataset")
    generator = random.Random(f"arithmetic {seed}")
    unordered = [(a, b) for a in range(_RANGE) for b in range(a, _RANGE)]
    generator.shuffle(unordered)
    held_out: set[tuple[int, int]] = set()
    for a, b in unordered:
        mirrored = {(a, b), (b, a)}
        if len(held_out) + len(mirrored) <= N_HELD_OUT:
            held_out |= mirrored
    pairs = [(a, b) for a in range(_RANGE) for b in range(_RANGE) if ((a, b) in held_out) == (split == "test")]
    generator.shuffle(pairs)
    return pairs


def _sums(split: str, seed: int) -> list[SourceRow]:
    pairs = arithmetic_pairs(split, seed)
    return [SourceRow(f"arithmetic[{split}]", {"sum": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]


def get_gsm8k_rl_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    *,
    instruction: str | None = GSM8K_INSTRUCTION,
    **options: Any,
) -> RowDataset:
    """Return RL rows of grade-school math word problems (Cobbe et al. 2021, arXiv:2110.14168).

    `answer` is the dataset's worked solution, which ends in `#### <number>`. Splits are "train" (7,473 rows) and "test"
    (1,319), from `train.jsonl` and `test.jsonl`. `max_length` needs a tokenizer.
    """
    options |= {"tokenizer": tokenizer, "max_length": max_length, "instruction": instruction}
    return rl_dataset(named_rows("gsm8k", path, split, subset="main"), f"gsm8k[{split}]", **_GSM8K_KEYS, **options)


def get_gsm8k_sft_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> RowDataset:
    """Return SFT rows: the question, then the worked solution, which is trained."""
    options |= {"tokenizer": require_tokenizer(tokenizer, "gsm8k"), "max_length": max_length}
    return sft_dataset(named_rows("gsm8k", path, split, subset="main"), f"gsm8k[{split}]", **_GSM8K_KEYS, **options)


def get_torl_data_rl_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> RowDataset:
    r"""Return RL rows of ToRL's math problems (Li et al. 2025, arXiv:2503.23383).

    `answer` is `\boxed{…}` around the dataset's `reward_model.ground_truth`, for math_verify. Splits are "train" and
    "test", from `train.parquet` and `test.parquet`.
    """
    options |= {"tokenizer": tokenizer, "max_length": max_length}
    return rl_dataset(_torl_rows(split, path), f"torl_data[{split}]", **_TORL_KEYS, **options)


def get_torl_data_sft_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> RowDataset:
    r"""Return SFT rows: the problem, then `\boxed{…}` around the gold answer (there are no worked solutions)."""
    options |= {"tokenizer": require_tokenizer(tokenizer, "torl_data"), "max_length": max_length}
    return sft_dataset(_torl_rows(split, path), f"torl_data[{split}]", **_TORL_KEYS, **options)


def named_rows(name: str, path: str | Path | None, split: str, subset: str | None = None) -> Sequence[SourceRow]:
    """Return the rows of a named dataset's files, by default in `data_folder`; `subset` is for the hub."""
    return open_rows(data_folder(name) if path is None else path, split, subset)


def require_tokenizer(tokenizer: Any, name: str) -> Any:
    """Return the tokenizer; raise TokenizerError with the dataset's name if it is None."""
    if tokenizer is None:
        raise TokenizerError(f"SFT rows of {name} are token ids: pass a tokenizer")
    return tokenizer


def _torl_rows(split: str, path: str | Path | None) -> list[SourceRow]:
    source = named_rows("torl_data", path, split)
    return [SourceRow(row.where, row.data | {"answer": _boxed_answer(row)}) for row in source]


def _boxed_answer(row: SourceRow) -> str:
    reward_model = require_column(row, "reward_model")
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") in (None, ""):
        raise DatasetError(f"{row.where}: 'reward_model' must hold 'ground_truth', got {reward_model!r:.80}")
    return rf"\boxed{{{reward_model['ground_truth']}}}"
