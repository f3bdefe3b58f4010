"""Datasets with images: geometry3k and clevr_count_70k.

Each takes `(path, split, tokenizer, max_length)` like the other named datasets, and a multimodal `processor` instead of
the tokenizer. With the `ImageReader` of a vision-language model as `processor` or `reader`, rows keep their images;
otherwise they are text only, and a warning counts the rows with images.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archon.data.image_rows import IMAGE
from archon.data.images import ImageReader
from archon.data.mapping import require_column, rl_dataset, sft_dataset
from archon.data.named_datasets import GSM8K_INSTRUCTION, named_rows, require_tokenizer
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

logger = logging.getLogger(__name__)

CLEVR_INSTRUCTION = "Put the number alone in brackets, as in [7]."
_KEYS: dict[str, Any] = {"prompt_key": "problem", "response_key": "answer"}


def get_geometry3k_rl_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    *,
    processor: Any = None,
    instruction: str | None = GSM8K_INSTRUCTION,
    **options: Any,
) -> RowDataset:
    """Return RL rows of geometry problems (Lu et al. 2021, arXiv:2105.04165).

    Columns follow `hiyouga/geometry3k`: problem, answer, images. A `processor` provides its tokenizer.
    """
    options |= {"max_length": max_length, "instruction": instruction, **_reader_options(processor, tokenizer, options)}
    return _rl_rows("geometry3k", path, split, options)


def get_geometry3k_sft_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    *,
    processor: Any = None,
    **options: Any,
) -> RowDataset:
    """Return SFT rows: the problem, then the answer, which is trained."""
    options |= {"max_length": max_length, **_reader_options(processor, tokenizer, options)}
    return _sft_rows("geometry3k", path, split, options)


def get_clevr_count_70k_rl_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    *,
    processor: Any = None,
    instruction: str | None = CLEVR_INSTRUCTION,
    **options: Any,
) -> RowDataset:
    """Return RL rows of counting questions on CLEVR scenes (Johnson et al. 2017, arXiv:1612.06890).

    Columns follow `BUAADreamer/clevr_count_70k`: problem, answer, images.
    """
    options |= {"max_length": max_length, "instruction": instruction, **_reader_options(processor, tokenizer, options)}
    return _rl_rows("clevr_count_70k", path, split, options)


def get_clevr_count_70k_sft_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    *,
    processor: Any = None,
    **options: Any,
) -> RowDataset:
    """Return SFT rows: the question, then the answer, which is trained."""
    options |= {"max_length": max_length, **_reader_options(processor, tokenizer, options)}
    return _sft_rows("clevr_count_70k", path, split, options)


def _rl_rows(name: str, path: str | Path | None, split: str, options: dict[str, Any]) -> RowDataset:
    source = _load_rows(name, path, split, options["reader"])
    return rl_dataset(source, f"{name}[{split}]", **_KEYS, **options)


def _sft_rows(name: str, path: str | Path | None, split: str, options: dict[str, Any]) -> RowDataset:
    require_tokenizer(options["tokenizer"], name)
    source = _load_rows(name, path, split, options["reader"])
    return sft_dataset(source, f"{name}[{split}]", **_KEYS, **options)


def _reader_options(processor: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer and reader.

    `processor` is an `ImageReader`, or a multimodal processor that provides the tokenizer.
    """
    if isinstance(processor, ImageReader):
        return {"tokenizer": tokenizer, "reader": processor}
    source = tokenizer if processor is None else processor
    return {"tokenizer": getattr(source, "tokenizer", source), "reader": options.get("reader")}


def _load_rows(name: str, path: str | Path | None, split: str, reader: ImageReader | None) -> Sequence[SourceRow]:
    """Return the rows of a dataset with images; without a reader also without these, and their places in the text."""
    source = named_rows(name, path, split)
    if reader is not None:
        return source
    if n_images := sum(bool(row.data.get("images")) for row in source):
        logger.warning("%s[%s]: omitting the images of %d rows: the model is text-only", name, split, n_images)
    return [SourceRow(row.where, _without_images(row)) for row in source]


def _without_images(row: SourceRow) -> dict[str, Any]:
    text = require_column(row, "problem")
    if not isinstance(text, str):
        raise DatasetError(f"{row.where}: 'problem' is a {type(text).__name__}; expected a string")
    kept = {key: value for key, value in row.data.items() if key not in ("images", "image")}
    return kept | {"problem": text.replace(IMAGE, "").strip()}
