"""`get_custom_dataset` with AReaL's arguments."""

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
    """Return the rows of a dataset named by its path or by a section of the configuration.

    A path that contains the name of a dataset (`openai/gsm8k`, `/data/gsm8k`) is read as that dataset, unless
    `prompt_key` is set.

    Args:
        path: a name of `VALID_DATASETS`, or a path; None: the path of `dataset_config`.
        type: kind of the rows: rl, sft, dpo or rw.
        split: part of the dataset.
        max_length: drop longer rows, in tokens.
        tokenizer: required except for "rl" without `max_length`.
        processor: a multimodal processor in place of the tokenizer, or an `ImageReader` that adds images to the rows.
        dataset_config: `train_data` or `eval_data` of a configuration.
        kind: alias of `type`.
        options: options of `archon.data.get_custom_dataset`.

    Raises:
        DatasetError: no dataset is named, or its rows are invalid.
    """
    fields = {} if dataset_config is None else dataset_config.model_dump(exclude={"limit", "split"}, exclude_unset=True)
    fields |= options
    if path is not None:
        fields["path"] = path
    if max_length is not None:
        fields["max_length"] = max_length
    if "path" not in fields:
        raise DatasetError("no dataset is named; pass its path, or dataset_config=config.train_data")
    contained = [name for name in VALID_DATASETS if name in str(fields["path"])]
    if contained and str(fields["path"]) not in VALID_DATASETS and "prompt_key" not in fields:
        fields |= {"data_dir": fields["path"], "path": max(contained, key=len)}
    if isinstance(processor, ImageReader):
        fields["reader"], processor = processor, None
    rows = read_dataset(
        kind=type or kind or "rl",
        split=split,
        tokenizer=getattr(processor, "tokenizer", processor) if tokenizer is None else tokenizer,
        **fields,
    )
    limit = dataset_config.limit if dataset_config is not None else None
    return rows if limit is None else rows.select(range(min(limit, len(rows))))
