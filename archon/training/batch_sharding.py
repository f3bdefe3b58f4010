"""Shard a batch over data-parallel ranks: every process holds the full batch and computes some documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_reduce
from archon.schema.errors import ConfigError


def require_documents(n: int, ranks: int, what: str) -> None:
    """Raise ConfigError if there are fewer documents `n` than data-parallel ranks. `what` names the setting."""
    if n < ranks:
        raise ConfigError(
            f"{what} = {n} leaves some of the {ranks} data-parallel ranks without a document; set it to {ranks} or "
            "more, or choose a layout with a smaller d"
        )


def shard_indices(lengths: Sequence[int], dp: Group) -> list[int]:
    """Return the rows of this rank, ascending: every `dp.size`-th by length, so that ranks have similar work."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(by_length[dp.rank :: dp.size])


def _shard_of(batch: Mapping[str, Any], dp: Group) -> list[int]:
    return shard_indices(batch["attention_mask"].sum(1).tolist(), dp)


def take_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Select rows of every column, a tensor [B, …] or a list of B."""
    return {
        name: value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }


def shard_batch(batch: Mapping[str, Any], dp: Group) -> dict[str, Any]:
    """Return the documents of this rank from a padded batch [B, S].

    A rank without a document gets a copy of the first one with an all-zero loss mask.
    """
    rows = _shard_of(batch, dp)
    if rows:
        return take_rows(batch, rows)
    placeholder = take_rows(batch, [0])
    placeholder["loss_mask"].zero_()
    return placeholder


def score_sharded(
    score: Callable[[dict[str, Any]], Tensor], batch: Mapping[str, Any], dp: Group, device: torch.device
) -> Tensor:
    """Score every document on one rank and share the results.

    Args:
        score: scores a padded batch.
        batch: the full padded batch [B, S].
        dp: the data-parallel group.
        device: device of the group's collectives.

    Returns:
        The scores [B, S] on the CPU, equal on all ranks.
    """
    local_scores = score(shard_batch(batch, dp))
    if dp.size == 1:
        return local_scores
    scores = local_scores.new_zeros(len(batch["input_ids"]), *local_scores.shape[1:])
    rows = _shard_of(batch, dp)
    if rows:
        scores[rows] = local_scores
    return all_reduce(scores.to(device), dp).cpu()
