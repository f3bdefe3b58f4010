"""Demonstrations: expert answers for mixed policy losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from archon.data import RowLoader
from archon.data.registry import load_rows
from archon.engine.batch import IMAGES
from archon.rl.config import DemonstrationsConfig
from archon.rl.trajectories import concat_padded_tensors, join_groups
from archon.training.loop import require_same_rows


class Demonstrations:
    """Dataset rows in a seeded order, `per_step` rows per step, each once per epoch.

    Args:
        config: the dataset and the number of rows per step.
        tokenizer: encodes rows as in SFT.
        seed: seeds the order.
    """

    def __init__(self, config: DemonstrationsConfig, tokenizer: Any, seed: int) -> None:
        rows = load_rows(config.data, "sft", tokenizer)
        require_same_rows(rows, config.data.path)
        self._loader = RowLoader(rows, batch_size=config.per_step, seed=seed, tail="wrap")

    def take(self) -> dict[str, Tensor]:
        """Return the next rows: `input_ids`, `loss_mask` int64 and `attention_mask` bool [B, S]."""
        padded = []
        for row in self._loader.next_batch():
            ids, mask = (torch.tensor(row[name]).unsqueeze(0) for name in ("input_ids", "loss_mask"))
            padded.append(
                {"input_ids": ids, "loss_mask": mask, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
            )
        return concat_padded_tensors(padded)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; raise `DatasetError` for other rows or another seed."""
        self._loader.load_state_dict(state)


def add_demonstrations(
    batch: Mapping[str, Any], rows: Mapping[str, Any], score: Callable[[str, Mapping[str, Any]], Tensor]
) -> dict[str, Tensor]:
    """Append demonstrations to a prepared batch, with a column `demonstrations` (1 at their tokens).

    Args:
        batch: the result of `PolicyUpdate.prepare`.
        rows: the result of `Demonstrations.take`.
        score: returns the logprobs of rows for a column, `logprobs` (policy) or `ref_logprobs`.
    """
    added: dict[str, Any] = {**rows, "logprobs": torch.zeros(rows["input_ids"].shape)}
    # No generator sampled them: the ratio is to the policy before the update.
    added["logprobs"] = score("logprobs", added)
    if "prox_logprobs" in batch:
        added["prox_logprobs"] = added["logprobs"]
    if "ref_logprobs" in batch:
        added["ref_logprobs"] = score("ref_logprobs", added)
    for name, value in {"advantages": 0.0, "policy_weights": 1.0, "temperatures": 0.0}.items():
        if name in batch:
            added[name] = torch.full(rows["input_ids"].shape, value, dtype=batch[name].dtype)
    if IMAGES in batch:
        added[IMAGES] = [[] for _ in rows["input_ids"]]
    both = [{**batch, "demonstrations": torch.zeros_like(batch["loss_mask"])}]
    both.append({**added, "demonstrations": rows["loss_mask"]})
    return join_groups(both)
