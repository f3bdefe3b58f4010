"""Loads the rows of a dataset's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archon.data import RowDataset, get_custom_dataset
from archon.data.registry import DatasetKind

if TYPE_CHECKING:
    from archon.data.config import DatasetConfig


def load_rows(config: DatasetConfig, kind: DatasetKind, tokenizer: Any) -> RowDataset:
    """Returns the rows of a dataset's configuration, at most `limit` of them."""
    dataset = get_custom_dataset(kind=kind, tokenizer=tokenizer, **config.model_dump(exclude={"limit"}))
    return RowDataset(dataset.name, dataset.rows[: config.limit], dataset.n_filtered)
