"""`get_custom_dataset` with the arguments of AReaL's releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.data import VALID_DATASETS, RowDataset, get_hh_rlhf_dpo_dataset, get_hh_rlhf_rw_dataset
from archon.data import get_custom_dataset as read_dataset
from archon.data.config import DatasetConfig
from archon.data.images import ImageReader
from archon.schema.errors import DatasetError

get_hhrlhf_rw_dataset, get_hhrlhf_dpo_dataset = get_hh_rlhf_rw_dataset, get_hh_rlhf_dpo_dataset


def get_custom_dataset(
    path: str | Path | None = None,
    type: str | None = None,
    split: str = "train",
    max_length: int | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    dataset_config: DatasetConfig | None = None,
    kind: str | None = None,
    **options: Any,
) -> RowDataset:
    """Return the rows of a dataset, named by its path or by a section of the configuration.

    A path that contains the name of a dataset (`openai/gsm8k`, `/data/gsm8k`) is read as that dataset from there,
    unless `prompt_key` is given.

    Args:
        path: A name of `VALID_DATASETS`, or a path; None: that of `dataset_config`.
        type: Kind of the rows: rl, sft, dpo or rw. `kind` is archon's name of it.
        split: Which part of the dataset.
        max_length: Drop longer rows, in tokens.
        tokenizer: Required except for "rl" without `max_length`.
        processor: In the tokenizer's place, that of a multimodal model; or the `ImageReader` of one, with which rows
            have their pictures.
        dataset_config: `train_data` or `eval_data` of a configuration.
        options: As in `archon.data.get_custom_dataset`.

    Raises:
        DatasetError: as there; or no dataset was named.
    """
    given = {} if dataset_config is None else dataset_config.model_dump(exclude={"limit", "split"}, exclude_unset=True)
    given |= options
    if path is not None:
        given["path"] = path
    if max_length is not None:
        given["max_length"] = max_length
    if "path" not in given:
        raise DatasetError("no dataset was named; give its path, or dataset_config=config.train_data")
    contained = [name for name in VALID_DATASETS if name in str(given["path"])]
    if contained and str(given["path"]) not in VALID_DATASETS and "prompt_key" not in given:
        given |= {"data_dir": given["path"], "path": max(contained, key=len)}
    if isinstance(processor, ImageReader):
        given["reader"], processor = processor, None
    rows = read_dataset(
        kind=type or kind or "rl",
        split=split,
        tokenizer=getattr(processor, "tokenizer", processor) if tokenizer is None else tokenizer,
        **given,
    )
    limit = dataset_config.limit if dataset_config is not None else None
    return rows if limit is None else rows.select(range(min(limit, len(rows))))
