"""Which documents of a batch a data-parallel rank has: every process knows the whole batch and trains its share."""

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


def shard_rows(dp: Group) -> slice:
    """The rows of this rank: every `dp.size`-th, so that a batch sorted by length is shared out evenly."""
    return slice(dp.rank, None, dp.size)


def shard_batch(batch: Mapping[str, Tensor], dp: Group) -> dict[str, Tensor]:
    """This rank's documents of a padded batch [B, S]; where there are fewer than ranks, a document of which nothing is
    trained stands in."""
    n = len(batch["input_ids"])
    if dp.rank < n:
        return {name: value[shard_rows(dp)] for name, value in batch.items()}
    spare = {name: value[:1].clone() for name, value in batch.items()}
    spare["loss_mask"].zero_()
    return spare


def score_sharded(
    score: Callable[[dict[str, Tensor]], Tensor], batch: Mapping[str, Tensor], dp: Group, device: torch.device
) -> Tensor:
    """`score` of every document, [B, S] on the CPU, each computed by the rank that has it and known to all.

    `device` is the engine's, where the group communicates.
    """
    own = score(shard_batch(batch, dp))
    if dp.size == 1:
        return own
    n = len(batch["input_ids"])
    whole = own.new_zeros(n, *own.shape[1:])
    if dp.rank < n:
        whole[shard_rows(dp)] = own
    return all_reduce(whole.to(device), dp).cpu()
