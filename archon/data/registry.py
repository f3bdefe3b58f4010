"""Datasets by name, or any source by the names of its columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from archon.data import named_datasets, pairs
from archon.data.config import DatasetConfig
from archon.data.mapping import RowDataset, rl_dataset, sft_dataset
from archon.data.sources import SourceRow, read_rows
from archon.schema.errors import DatasetError, TokenizerError

DatasetKind = Literal["rl", "sft", "dpo", "rw"]

# By the name of a dataset: the function that returns its rows of each kind.
_NAMED: dict[str, dict[str, Callable[..., RowDataset]]] = {
    "arithmetic": {
        "rl": named_datasets.get_arithmetic_rl_dataset,
        "sft": named_datasets.get_arithmetic_sft_dataset,
    },
    "gsm8k": {"rl": named_datasets.get_gsm8k_rl_dataset, "sft": named_datasets.get_gsm8k_sft_dataset},
    "hh_rlhf": {"dpo": pairs.get_hh_rlhf_dpo_dataset, "rw": pairs.get_hh_rlhf_rw_dataset},
    "torl_data": {"rl": named_datasets.get_torl_data_rl_dataset, "sft": named_datasets.get_torl_data_sft_dataset},
}
_READ_FROM_FILES = ("gsm8k", "hh_rlhf", "torl_data")
VALID_DATASETS = tuple(_NAMED)


def load_rows(config: DatasetConfig, kind: DatasetKind, tokenizer: Any) -> RowDataset:
    """Returns the rows of a dataset's configuration, at most `limit` of them."""
    dataset = get_custom_dataset(kind=kind, tokenizer=tokenizer, **config.model_dump(exclude={"limit"}))
    return replace(dataset, rows=dataset.rows[: config.limit])


def get_custom_dataset(
    path: str | Path,
    *,
    kind: DatasetKind = "rl",
    split: str = "train",
    tokenizer: Any = None,
    prompt_key: str = "prompt",
    response_key: str | None = "response",
    system_prompt: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    subset: str | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    raw: bool = False,
) -> RowDataset:
    """Returns rows of a named dataset (`VALID_DATASETS`), or of any JSONL, parquet or Hugging Face dataset.

    Args:
        path: A name of `VALID_DATASETS`, or a source of `read_rows`: a file, a folder, a hub name, a function.
        kind: "rl" rows have `messages`, `prompt`, `answer`; "sft" rows `input_ids`, `loss_mask`; "dpo" and "rw" rows
            ids and masks of a chosen and a rejected answer.
        split: "train" or "test" for the named datasets.
        tokenizer: Required except for "rl" without `max_length`.
        prompt_key: Column with the prompt: a string, or a list of messages. Not used for named datasets.
        response_key: Column with the response, or for "rl" the gold answer. None: conversations in `prompt_key` (SFT),
            or in the columns `chosen` and `rejected` (pairs), which otherwise hold the two answers.
        system_prompt: Prepended to conversations without a system message.
        instruction: Appended to the last user message. For RL on gsm8k the default asks for a boxed answer.
        max_length: Drop longer rows, in tokens: of the full example for "sft", of the prompt for "rl".
        subset: The configuration of a hub dataset that has several; not for other sources.
        data_dir: The folder of a named dataset's files.
        seed: Determines the split of the arithmetic dataset.
        raw: RL rows also hold the source's row, under `raw_task`. Rows of a file or a hub dataset without the two
            columns then hold nothing else, and are not dropped by length.

    Raises:
        DatasetError: missing, empty or malformed data; names the file, the line and the key.
        TokenizerError: no tokenizer where one is required, or one that cannot encode SFT examples.
    """
    if kind not in get_args(DatasetKind):
        raise DatasetError(f"kind is {kind!r}; expected one of {', '.join(get_args(DatasetKind))}")
    if kind != "rl" and tokenizer is None:
        raise TokenizerError(f"no tokenizer was given; {kind.upper()} rows of {path} are token ids: pass a tokenizer")
    if raw and kind != "rl":
        raise DatasetError(f"raw is true, but the rows are of kind {kind!r}; expected 'rl': leave raw out")
    if data_dir is not None and str(path) not in _READ_FROM_FILES:
        raise DatasetError(
            f"data_dir is {str(data_dir)!r}, but the dataset is {path}; expected {', '.join(_READ_FROM_FILES)}: leave "
            "data_dir out"
        )
    if subset is not None and (str(path) in _NAMED or Path(path).expanduser().exists()):
        raise DatasetError(f"subset is {subset!r}, but {path} is not a Hugging Face dataset; leave subset out")
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length, "system_prompt": system_prompt}
    if instruction is not None:
        shared["instruction"] = instruction
    if str(path) in _NAMED:
        if kind not in _NAMED[str(path)]:
            raise DatasetError(f"{path} has no rows of kind {kind!r}; expected {' or '.join(_NAMED[str(path)])}")
        if str(path) == "arithmetic":
            shared["seed"] = seed
        if data_dir is not None:
            shared["path"] = data_dir
        named = _NAMED[str(path)][kind](split, **shared)
        return replace(named, rows=[{**row, "raw_task": row} for row in named]) if raw else named
    source, name = read_rows(path, split, subset), f"{path}[{split}]"
    if raw:
        source = [SourceRow(row.where, {**row.data, "raw_task": row.data}) for row in source]
        if any(key not in row.data for row in source for key in (prompt_key, response_key)):
            return RowDataset(name, [{"raw_task": row.data["raw_task"]} for row in source])
    if kind in ("dpo", "rw"):
        return pairs.pair_dataset(source, name, prompt_key=None if response_key is None else prompt_key, **shared)
    if kind == "sft":
        return sft_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
    if response_key is None:
        raise DatasetError(f"response_key is null; RL rows of {path} need the column of the gold answer: name it")
    return rl_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
