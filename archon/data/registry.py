"""Datasets by name, or any source by naming its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from archon.data.arithmetic import get_arithmetic_rl_dataset, get_arithmetic_sft_dataset
from archon.data.gsm8k import get_gsm8k_rl_dataset, get_gsm8k_sft_dataset
from archon.data.mapping import RowDataset, rl_dataset, sft_dataset
from archon.data.pairs import get_hh_rlhf_dpo_dataset, get_hh_rlhf_rw_dataset, pair_dataset
from archon.data.sources import SourceRow, read_rows
from archon.data.torl_data import get_torl_data_rl_dataset, get_torl_data_sft_dataset
from archon.schema.errors import DatasetError, TokenizerError

DatasetKind = Literal["rl", "sft", "dpo", "rw"]

# A named set: the function that gives its rows of each kind.
_NAMED: dict[str, dict[str, Callable[..., RowDataset]]] = {
    "arithmetic": {"rl": get_arithmetic_rl_dataset, "sft": get_arithmetic_sft_dataset},
    "gsm8k": {"rl": get_gsm8k_rl_dataset, "sft": get_gsm8k_sft_dataset},
    "hh_rlhf": {"dpo": get_hh_rlhf_dpo_dataset, "rw": get_hh_rlhf_rw_dataset},
    "torl_data": {"rl": get_torl_data_rl_dataset, "sft": get_torl_data_sft_dataset},
}
_IN_FOLDERS = ("gsm8k", "hh_rlhf", "torl_data")
VALID_DATASETS = tuple(_NAMED)


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
    """RL or SFT rows of a named set (`VALID_DATASETS`) or of any JSONL, parquet or Hugging Face set by key mapping.

    Args:
        path: A name of `VALID_DATASETS`, or what `read_rows` takes: a file, a folder, a hub name.
        kind: "rl" gives `messages`, `prompt`, `answer`; "sft" gives `input_ids`, `loss_mask`; "dpo" and "rw" both for
            `chosen` and `rejected`.
        split: "train" or "test" for the named sets.
        tokenizer: Needed for all but "rl", and for that with `max_length`.
        prompt_key: Column with the prompt: a text, or a list of messages. A named set knows its own.
        response_key: Column with the response, or for "rl" the gold answer. None: conversations in `prompt_key` (SFT),
            or in the columns `chosen` and `rejected` (pairs), which otherwise hold the two answers.
        system_prompt: Put before conversations that have no system message.
        instruction: Put behind the last user message. For RL on gsm8k it defaults to asking for a boxed answer.
        max_length: Leaves out longer rows, in tokens: of the whole example for "sft", of the prompt for "rl".
        subset: The configuration of a hub set that has several; of no other source.
        data_dir: The folder of a named set's files.
        seed: Fixes the split of the arithmetic set.
        raw: RL rows also hold the row as it stands in its source, under `raw_task`. Rows of a file or a hub set that
            lack the two columns then hold nothing else, whatever their length.

    Raises:
        DatasetError: missing, empty or malformed; names the file, the line and the key.
        TokenizerError: "sft" without a tokenizer, or with one that cannot do it.
    """
    if kind not in get_args(DatasetKind):
        raise DatasetError(f"kind must be one of {', '.join(get_args(DatasetKind))}, got {kind!r}")
    if kind != "rl" and tokenizer is None:
        raise TokenizerError(f"{kind.upper()} rows of {path} are token ids: give the tokenizer")
    if raw and kind != "rl":
        raise DatasetError(f"raw=true is for RL rows, and these are of kind {kind!r}; leave it out")
    if data_dir is not None and str(path) not in _IN_FOLDERS:
        raise DatasetError(
            f"data_dir={str(data_dir)!r} is for the files of {', '.join(_IN_FOLDERS)}, and the dataset is {path}; "
            "leave it out"
        )
    if subset is not None and (str(path) in _NAMED or Path(path).expanduser().exists()):
        raise DatasetError(f"subset={subset!r} is for a Hugging Face set, and {path} is none; leave it out")
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length, "system_prompt": system_prompt}
    if instruction is not None:
        shared["instruction"] = instruction
    if str(path) in _NAMED:
        if kind not in _NAMED[str(path)]:
            raise DatasetError(f"{path} has no rows of kind {kind!r}; it has {', '.join(_NAMED[str(path)])}")
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
        return pair_dataset(source, name, prompt_key=None if response_key is None else prompt_key, **shared)
    if kind == "sft":
        return sft_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
    if response_key is None:
        raise DatasetError(f"RL rows of {path} need the column of the gold answer: give response_key")
    return rl_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
