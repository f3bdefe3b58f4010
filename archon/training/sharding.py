"""Shards a batch over data-parallel ranks: every process has the whole batch, and computes on its documents of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_reduce
from archon.schema.errors import ConfigError


def require_documents(n: int, ranks: int, what: str) -> None:
    """ConfigError where `n` documents (`what` names the setting) leave a data-parallel rank without one."""
    if n < ranks:
        raise ConfigError(
            f"{what} = {n} leaves some of the {ranks} data-parallel ranks without a document; set it to {ranks} or "
            "more, or choose a layout with a smaller d"
        )


def shard_slice(dp: Group) -> slice:
    """Returns the slice of this rank's rows: every `dp.size`-th, so that a batch sorted by length is sharded evenly."""
    return slice(dp.rank, None, dp.size)


def shard_batch(batch: Mapping[str, Tensor], dp: Group) -> dict[str, Tensor]:
    """Returns this rank's documents of a padded batch [B, S].

    Where there are fewer documents than ranks, a rank without one gets a copy of which no token is trained.
    """
    n = len(batch["input_ids"])
    if dp.rank < n:
        return {name: value[shard_slice(dp)] for name, value in batch.items()}
    spare = {name: value[:1].clone() for name, value in batch.items()}
    spare["loss_mask"].zero_()
    return spare


def score_sharded(
    score: Callable[[dict[str, Tensor]], Tensor], batch: Mapping[str, Tensor], dp: Group, device: torch.device
) -> Tensor:
    """Returns `score` of every document, [B, S] on the CPU of every rank, each computed by the rank that has it.

    `device` is the engine's, where the group communicates.
    """
    own = score(shard_batch(batch, dp))
    if dp.size == 1:
        return own
    n = len(batch["input_ids"])
    whole = own.new_zeros(n, *own.shape[1:])
    if dp.rank < n:
        whole[shard_slice(dp)] = own
    return all_reduce(whole.to(device), dp).cpu()
