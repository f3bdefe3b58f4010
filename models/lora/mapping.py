"""Which of several adapters each row of a layer's input uses: of a batch whose documents have different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_gather
from archon.parallel.transfer import to_device_async

NO_LORA = -1
"""The index of the adapter of a row that has none: the layer's own output."""


@dataclass(frozen=True, eq=False)
class LoRAMapping:
    """The adapter of each of T rows. Layers take it as an argument, sort their rows by it, and group their products.

    Attributes:
        names: the n adapters that ids are indices of.
        ids: int64 [T], with n for a row without an adapter.
        counts: int64 [n + 1], the rows of each adapter, and last those without; [n] if every row is known to have one.
        order, inverse: int64 [T], the permutation that sorts rows by id, and the one back; None if they are sorted.
        tp_shard: of the tokens that this rank holds between layers, where tensor parallelism splits them: latent layers
            and experts compute these. None if they are all rows.
    """

    names: tuple[str, ...]
    ids: Tensor
    counts: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None
    tp_shard: LoRAMapping | None = None
    on_host: Tensor | None = None
    """`ids` on the CPU, where the host knows them."""

    @classmethod
    def of(cls, names: Sequence[str], ids: Tensor, device: torch.device, *, tp: Group | None = None) -> LoRAMapping:
        """Return the rows of adapter indices `ids`, int64 [T] on the CPU, on `device`.

        Args:
            names: the adapters that the indices mean; `NO_LORA` is none of them.
            tp: the ranks that hold equal parts of the rows between layers.
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

    @cached_property
    def host_ids(self) -> Tensor:
        """`ids` on the CPU, copied from the device if the host does not know them."""
        return self.ids.cpu() if self.on_host is None else self.on_host

    @cached_property
    def runs(self) -> tuple[tuple[str, int, int], ...]:
        """(name, first row, row after the last) of consecutive rows with one adapter."""
        found, first = [], 0
        for index, rows in groupby(self.host_ids.tolist()):
            last = first + len(list(rows))
            if index < len(self.names):
                found.append((self.names[index], first, last))
            first = last
        return tuple(found)

    def rows(self, first: int, last: int) -> LoRAMapping:
        """Return the adapters of the rows from `first` to before `last`."""
        return LoRAMapping.of(self.names, self.host_ids[first:last], self.ids.device)

    def repeated(self, row: int, count: int) -> LoRAMapping:
        """Return the adapters of `count` rows that all have that of `row`."""
        return LoRAMapping.of(self.names, self.host_ids[row].expand(count), self.ids.device)

    @property
    def local_rows(self) -> LoRAMapping:
        """The rows that this rank holds between layers."""
        return self.tp_shard or self

    def sort(self, x: Tensor) -> Tensor:
        """Return rows x [T, ...] sorted by adapter."""
        return x if self.order is None else x.index_select(0, self.order)

    def unsort(self, x: Tensor) -> Tensor:
        """Undo `sort`, with gradient."""
        return x if self.inverse is None else x.index_select(0, self.inverse)

    def gathered(self, group: Group) -> LoRAMapping:
        """Return the adapters of the rows of all ranks, in the order in which `all_gather` joins the rows."""
        ids = all_gather(self.ids, group)
        order = ids.argsort(stable=True)
        counts = ids.new_zeros(len(self.names) + 1).scatter_add_(0, ids, torch.ones_like(ids))
        return LoRAMapping(self.names, ids, counts, order, order.argsort())
