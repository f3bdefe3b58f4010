"""LoRA of each row of a layer's input, for batches of documents with different LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_gather
from archon.parallel.transfer import to_device_async

NO_LORA = -1
"""LoRA index of a row without a LoRA."""


@dataclass(frozen=True, eq=False)
class LoRAMapping:
    """LoRA of each of T rows. Layers sort their rows by it and group their matmuls.

    Attributes:
        names: names of the n LoRAs.
        ids: int64 [T], index into `names`, n for a row without a LoRA.
        counts: int64 [n + 1], rows of each LoRA, rows without one last; [n] if every row has one.
        dropout_keys: int64 [T], the hash of each token for LoRA dropout; None outside training and without dropout.
        order, inverse: int64 [T], the permutation that sorts rows by id, and its inverse; None if they are sorted.
        tp_shard: mapping of this rank's token shard, which latent layers and experts compute under tensor parallelism.
            None without a shard.
    """

    names: tuple[str, ...]
    ids: Tensor
    counts: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None
    tp_shard: LoRAMapping | None = None
    on_host: Tensor | None = None
    """`ids` on the CPU, if the host knows them."""
    dropout_keys: Tensor | None = None

    @classmethod
    def of(cls, names: Sequence[str], ids: Tensor, device: torch.device, *, tp: Group | None = None) -> LoRAMapping:
        """Return the mapping of rows with LoRA indices `ids`.

        Args:
            names: names of the LoRAs.
            ids: int64 [T] on the CPU; `NO_LORA` means none.
            device: device of the mapping.
            tp: ranks that hold equal token shards between layers.
        """
        ids = torch.where(ids == NO_LORA, len(names), ids)
        tp_shard = None
        if tp is not None and tp.size > 1:
            tp_shard = cls.of(names, ids.chunk(tp.size)[tp.rank], device)
        order = inverse = None
        if (ids.diff() < 0).any():
            rows = ids.argsort(stable=True)
            order, inverse = (to_device_async(x, device) for x in (rows, rows.argsort()))
        counts = to_device_async(ids.bincount(minlength=len(names)), device)
        return cls(tuple(names), to_device_async(ids, device), counts, order, inverse, tp_shard, ids)

    @classmethod
    def for_dropout(cls, keys: Tensor, device: torch.device, *, tp: Group | None = None) -> LoRAMapping:
        """Return the mapping of rows of a single-LoRA model with the dropout keys int64 [T] on the CPU; see `of`."""
        mapping = cls.of((), torch.zeros_like(keys), device, tp=tp)
        shard = mapping.tp_shard
        if shard is not None and tp is not None:
            shard = replace(shard, dropout_keys=to_device_async(keys.chunk(tp.size)[tp.rank], device))
        return replace(mapping, tp_shard=shard, dropout_keys=to_device_async(keys, device))

    @cached_property
    def host_ids(self) -> Tensor:
        """`ids` on the CPU, copied from the device if the host does not know them."""
        return self.ids.cpu() if self.on_host is None else self.on_host

    @cached_property
    def runs(self) -> tuple[tuple[str, int, int], ...]:
        """(name, first row, end row) of each run of consecutive rows with one LoRA."""
        runs, first = [], 0
        for index, rows in groupby(self.host_ids.tolist()):
            last = first + len(list(rows))
            if index < len(self.names):
                runs.append((self.names[index], first, last))
            first = last
        return tuple(runs)

    @classmethod
    def on_device(cls, names: Sequence[str], ids: Tensor) -> LoRAMapping:
        """Return the mapping of rows with `ids` that only their device knows, see `LoRAMapping`."""
        order = ids.argsort(stable=True)
        counts = ids.new_zeros(len(names) + 1).scatter_add_(0, ids, torch.ones_like(ids))
        return cls(tuple(names), ids, counts, order, order.argsort())

    def others(self, rank: int) -> Tensor:
        """Return whether column c of [T, n rank] belongs to another LoRA than that of the row: c // rank."""
        if rank not in self._others:
            columns = torch.arange(len(self.names), device=self.ids.device).repeat_interleave(rank)
            self._others[rank] = columns != self.ids.unsqueeze(1)
        return self._others[rank]

    @cached_property
    def _others(self) -> dict[int, Tensor]:
        return {}

    def rows(self, first: int, last: int) -> LoRAMapping:
        """Return the mapping of rows `first` to `last` (exclusive)."""
        return LoRAMapping.of(self.names, self.host_ids[first:last], self.ids.device)

    def repeated(self, row: int, count: int) -> LoRAMapping:
        """Return the mapping of `count` rows with the LoRA of `row`."""
        return LoRAMapping.of(self.names, self.host_ids[row].expand(count), self.ids.device)

    @property
    def local_rows(self) -> LoRAMapping:
        """Mapping of the rows that this rank holds between layers."""
        return self.tp_shard or self

    def sort(self, x: Tensor) -> Tensor:
        """Return rows x [T, ...] sorted by LoRA."""
        return x if self.order is None else x.index_select(0, self.order)

    def unsort(self, x: Tensor) -> Tensor:
        """Undo `sort`, with gradient."""
        return x if self.inverse is None else x.index_select(0, self.inverse)

    def gathered(self, group: Group) -> LoRAMapping:
        """Return the mapping of the rows of all ranks, in the order of `all_gather`."""
        keys = None if self.dropout_keys is None else all_gather(self.dropout_keys, group)
        return replace(LoRAMapping.on_device(self.names, all_gather(self.ids, group)), dropout_keys=keys)
