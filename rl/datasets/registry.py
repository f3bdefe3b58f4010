"""Datasets by name, or any source by naming its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from archon.rl.datasets.arithmetic import get_arithmetic_rl_dataset, get_arithmetic_sft_dataset
from archon.rl.datasets.gsm8k import INSTRUCTION, get_gsm8k_rl_dataset, get_gsm8k_sft_dataset
from archon.rl.datasets.mapping import RowDataset, rl_dataset, sft_dataset
from archon.rl.datasets.sources import read_rows
from archon.schema.errors import DatasetError, TokenizerError

VALID_DATASETS = ("arithmetic", "gsm8k")


def get_custom_dataset(
    path: str | Path,
    *,
    kind: Literal["rl", "sft"] = "rl",
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
) -> RowDataset:
    """RL or SFT rows of a named set (`VALID_DATASETS`) or of any JSONL, parquet or Hugging Face set by key mapping.

    Args:
        path: A name of `VALID_DATASETS`, or what `read_rows` takes: a file, a folder, a hub name.
        kind: "rl" gives `messages`, `prompt`, `answer`; "sft" gives `input_ids`, `loss_mask`.
        split: "train" or "test" for the named sets.
        tokenizer: Needed for "sft", and for "rl" with `max_length`.
        prompt_key: Column with the prompt: a text, or a list of messages. A named set knows its own.
        response_key: Column with the response, or for "rl" the gold answer. None: conversations in `prompt_key` (SFT).
        system_prompt: Put before conversations that have no system message.
        instruction: Put behind the last user message. For RL on gsm8k it defaults to asking for a boxed answer.
        max_length: Leaves out longer rows, in tokens: of the whole example for "sft", of the prompt for "rl".
        subset: The configuration of a hub set that has several; of no other source.
        data_dir: The folder of gsm8k's files; of no other set.
        seed: Fixes the split of the arithmetic set.

    Raises:
        DatasetError: missing, empty or malformed; names the file, the line and the key.
        TokenizerError: "sft" without a tokenizer, or with one that cannot do it.
    """
    if kind not in ("rl", "sft"):
        raise DatasetError(f"kind must be 'rl' or 'sft', got {kind!r}")
    if kind == "sft" and tokenizer is None:
        raise TokenizerError(f"SFT rows of {path} are token ids: give the tokenizer")
    if data_dir is not None and str(path) != "gsm8k":
        raise DatasetError(
            f"data_dir={str(data_dir)!r} is for the files of gsm8k, and the dataset is {path}; leave it out"
        )
    if subset is not None and (str(path) in VALID_DATASETS or Path(path).expanduser().exists()):
        raise DatasetError(f"subset={subset!r} is for a Hugging Face set, and {path} is none; leave it out")
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length, "system_prompt": system_prompt}
    if str(path) == "arithmetic":
        if kind == "sft":
            return get_arithmetic_sft_dataset(split, seed=seed, instruction=instruction, **shared)
        return get_arithmetic_rl_dataset(split, seed=seed, instruction=instruction, **shared)
    if str(path) == "gsm8k":
        if kind == "sft":
            return get_gsm8k_sft_dataset(split, data_dir, instruction=instruction, **shared)
        asked = INSTRUCTION if instruction is None else instruction
        return get_gsm8k_rl_dataset(split, data_dir, instruction=asked, **shared)
    shared |= {"prompt_key": prompt_key, "instruction": instruction}
    source = read_rows(path, split, subset)
    name = f"{path}[{split}]"
    if kind == "sft":
        return sft_dataset(source, name, response_key=response_key, **shared)
    if response_key is None:
        raise DatasetError(f"RL rows of {path} need the column of the gold answer: give response_key")
    return rl_dataset(source, name, response_key=response_key, **shared)
