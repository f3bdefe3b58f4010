"""Which documents of a batch a data-parallel rank has: every process knows the whole batch and trains its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def own_rows(lengths: Sequence[int], dp: Group) -> list[int]:
    """Returns the rows of this rank, in their order: by length every `dp.size`-th, so that ranks have even work."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(by_length[dp.rank :: dp.size])


def _own_rows(batch: Mapping[str, Tensor], dp: Group) -> list[int]:
    return own_rows(batch["attention_mask"].sum(1).tolist(), dp)


def own_documents(batch: Mapping[str, Tensor], dp: Group) -> dict[str, Tensor]:
    """This rank's documents of a padded batch [B, S]; where there are fewer than ranks, a document of which nothing is
    trained stands in."""
    rows = _own_rows(batch, dp)
    if rows:
        return {name: value[rows] for name, value in batch.items()}
    spare = {name: value[:1].clone() for name, value in batch.items()}
    spare["loss_mask"].zero_()
    return spare


def score_shared(
    score: Callable[[dict[str, Tensor]], Tensor], batch: Mapping[str, Tensor], dp: Group, device: torch.device
) -> Tensor:
    """`score` of every document, [B, S] on the CPU, each computed by the rank that has it and known to all.

    `device` is the engine's, where the group communicates.
    """
    own = score(own_documents(batch, dp))
    if dp.size == 1:
        return own
    whole = own.new_zeros(len(batch["input_ids"]), *own.shape[1:])
    rows = _own_rows(batch, dp)
    if rows:
        whole[rows] = own
    return all_reduce(whole.to(device), dp).cpu()
