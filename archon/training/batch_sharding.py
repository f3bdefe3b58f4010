"""Shards a batch over data-parallel ranks: every process has the whole batch, and computes on some documents."""

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
    """Returns this rank's rows, ascending: every `dp.size`-th by length, so that ranks have similar work."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(by_length[dp.rank :: dp.size])


def _shard_of(batch: Mapping[str, Any], dp: Group) -> list[int]:
    return shard_indices(batch["attention_mask"].sum(1).tolist(), dp)


def take_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Returns some rows of every column, a tensor [B, …] or a list of B."""
    return {
        name: value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }


def shard_batch(batch: Mapping[str, Any], dp: Group) -> dict[str, Any]:
    """Returns this rank's documents of a padded batch [B, S].

    A rank without a document gets a copy of the first one, with an all-zero loss mask.
    """
    rows = _shard_of(batch, dp)
    if rows:
        return take_rows(batch, rows)
    spare = take_rows(batch, [0])
    spare["loss_mask"].zero_()
    return spare


def score_sharded(
    score: Callable[[dict[str, Any]], Tensor], batch: Mapping[str, Any], dp: Group, device: torch.device
) -> Tensor:
    """Returns `score` of every document, [B, S] on the CPU of every rank, each computed on one rank.

    `device` is the one on which the group communicates.
    """
    own = score(shard_batch(batch, dp))
    if dp.size == 1:
        return own
    whole = own.new_zeros(len(batch["input_ids"]), *own.shape[1:])
    rows = _shard_of(batch, dp)
    if rows:
        whole[rows] = own
    return all_reduce(whole.to(device), dp).cpu()
