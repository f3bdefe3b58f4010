"""Trainers on rows that the script loads, with AReaL's constructors.

Configurations are archon's; `train_data` and `eval_data` replace missing rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from archon.data import RowDataset
from archon.data.mapping import encoded_rows
from archon.data.sources import SourceRow
from archon.rl.config import RLConfig
from archon.rl.trainer import RLTrainer
from archon.schema.errors import DatasetError
from archon.training import SFTConfig
from archon.training import SFTTrainer as ConfiguredSFTTrainer

Rows = Iterable[Mapping[str, Any]]


class PPOTrainer(RLTrainer):
    """`RLTrainer` on rows: `with PPOTrainer(config, train_dataset=rows) as trainer: trainer.train(workflow=…)`.

    Args:
        config: configuration of the run.
        train_dataset: prompts as dictionaries (list, `RowDataset`, Hugging Face dataset); None: `train_data`.
        valid_dataset: held-out prompts; None: `eval_data`.
    """

    def __init__(self, config: RLConfig, train_dataset: Rows | None = None, valid_dataset: Rows | None = None) -> None:
        super().__init__(config)
        self._rows = _dataset_rows(train_dataset, valid_dataset)

    def section_rows(self, section: str) -> Sequence[dict[str, Any]]:
        """Return the passed rows, or else the configured rows."""
        return self._rows.get(section) or super().section_rows(section)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: a run closes what it opened."""


class SFTTrainer(ConfiguredSFTTrainer):
    """`archon.rl.SFTTrainer` on rows of `input_ids` and `loss_mask`; arguments as in `PPOTrainer`."""

    def __init__(self, config: SFTConfig, train_dataset: Rows | None = None, valid_dataset: Rows | None = None) -> None:
        super().__init__(config)
        self._rows = _dataset_rows(train_dataset, valid_dataset)

    def section_rows(self, section: str, tokenizer: Any) -> RowDataset | None:
        """Return the passed rows after validation, or else the configured rows."""
        if section not in self._rows:
            return super().section_rows(section, tokenizer)
        rows = self._rows[section]
        return RowDataset(section, encoded_rows([SourceRow(f"{section} row {n}", row) for n, row in enumerate(rows)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: a run closes what it opened."""


def _dataset_rows(train_dataset: Rows | None, valid_dataset: Rows | None) -> dict[str, list[dict[str, Any]]]:
    sections = {}
    for section, name, rows in (("train_data", "train", train_dataset), ("eval_data", "valid", valid_dataset)):
        if rows is not None:
            sections[section] = [dict(row) for row in rows]
            if not sections[section]:
                raise DatasetError(f"{name}_dataset is empty; expected at least one row, or None for {section}")
    return sections
