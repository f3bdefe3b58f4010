"""Low-rank adapters (LoRA: Hu et al. 2022, arXiv:2106.09685), which layers add to their products.

An adapter adds scale * b a x to a product W x, with a [r, in] and b [out, r]. It is split as W is: for a column product
each rank has all of a and its rows of b, for a row product its columns of a and all of b. What all ranks have gets a
term of a sum as its gradient, and what a rank adds to a row product is a term of the sum that the layer scatters
anyway. So adapters need no collective of their own.

A matrix may have several adapters (`MultiLoRALayer`), each with parameters of its own, of which every row uses one
or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.layers.matmul import (
    LoRAGroup,
    add_loras,
    grouped_linear,
    lora_linear,
    padded_group_width,
    supports_grouped_mm,
)
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.comm import local
from archon.parallel.transfer import to_device_async


class LoRALayer(nn.Module):
    """The adapter of a linear layer, or that of one matrix of every expert.

    Attributes:
        a, b: [r, in] and [out, r]; [E, r, in] and [E, out, r] for `experts` E.
        scale: factor on b a.
        casts_parameters: a and b may be wider than the computation, which rounds them itself.
        enabled: whether the layer adds it; see `archon.models.lora.model.model.disable_lora`.
    """

    casts_parameters: ClassVar[bool] = True
    enabled = True

    def __init__(
        self, in_features: int, out_features: int, rank: int, scale: float, experts: int | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        stack = () if experts is None else (experts,)
        self.a = nn.Parameter(torch.empty(*stack, rank, in_features))
        self.b = nn.Parameter(torch.empty(*stack, out_features, rank))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice | None = None) -> Tensor:
        """Return [T, out] for x [T, in] of a linear layer: the product with its weight and bias, and the adapter's.

        `rows` of b are this rank's of a shared head.
        """
        a, b = self.parts(x.dtype, rows)
        return lora_linear(x, weight, bias, a, b, self.scale)

    def parts(self, dtype: torch.dtype, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return a and b as this rank uses them, in the dtype of the computation."""
        a = local(self.a)
        b = local(self.b)
        return a.to(dtype), (b if rows is None else b[rows]).to(dtype)

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.a.shape)}, {tuple(self.b.shape)}, scale={self.scale:g}"


class MultiLoRALayer(nn.ModuleDict):
    """Several adapters of one matrix, or of one matrix of every expert, by name: `LoRALayer`s of any ranks and
    scales.
    """

    enabled = True

    def forward(self, out: Tensor, x: Tensor, lora_mapping: LoRAMapping, rows: slice | None = None) -> Tensor:
        """Return out [T, out] of a linear layer for x [T, in] plus what each row's adapter adds, see `LoRALayer`."""
        if not self._has_any(lora_mapping.names):
            return out
        added = self._add_to(
            lora_mapping.sort(out), lora_mapping.sort(x), lora_mapping.names, lora_mapping.counts, rows
        )
        return lora_mapping.unsort(added)

    def part(self, name: str) -> LoRALayer | None:
        """Return the adapter of this name, None if this matrix has none."""
        lora = self._modules.get(name)
        return lora if isinstance(lora, LoRALayer) else None

    def add_to_experts(self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor) -> Tensor:
        """Return out [N, out] plus what the adapters of rows x [N, in] add, which are sorted by expert, then adapter.

        Args:
            names: the n adapters that rows may have; one that this matrix lacks adds nothing.
            counts: int64 [E (n + 1)], of each expert the rows of each adapter, and last those of none.
        """
        return self._add_to(out, x, names, counts) if self._has_any(names) else out

    def _has_any(self, names: Sequence[str]) -> bool:
        return any(name in self for name in names)

    def _add_to(
        self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor, rows: slice | None = None
    ) -> Tensor:
        """Return out [N, out] plus what the adapters of rows x [N, in] add, which are sorted by group.

        Every adapter of `names` has a gradient, 0 without rows: ranks that sum gradients need the same ones.
        """
        loras = [self.part(name) for name in names]
        own = [(index, lora) for index, lora in enumerate(loras) if lora is not None]
        parts = [lora.parts(x.dtype, rows) for _, lora in own]
        a, b = parts[0]
        experts = a.shape[0] if a.dim() == 3 else 1
        of_expert = counts.shape[0] // experts
        if prefers_loop(x) or not supports_grouped_mm(x, a.shape[-1], b.shape[-2]):
            places = {index: (place, lora.scale) for place, (index, lora) in enumerate(own)}
            return add_loras(out, x, _groups(counts.tolist(), of_expert, places, stacked=a.dim() == 3), parts)
        rank = padded_group_width(max(part[0].shape[-2] for part in parts), x)
        nothing = a.new_zeros(*a.shape[:-2], 0, a.shape[-1]), b.new_zeros(*b.shape[:-1], 0)
        of_groups = [nothing] * of_expert
        scales = [own[0][1].scale] * of_expert  # of rows without an adapter any will do
        for (index, lora), part in zip(own, parts, strict=True):
            of_groups[index], scales[index] = part, lora.scale
        pairs = [_padded(part, rank) for part in of_groups]
        stacked_a, stacked_b = (torch.stack(side, dim=-3).flatten(0, -3) for side in zip(*pairs, strict=True))
        hidden = grouped_linear(x, stacked_a, counts)
        return out + grouped_linear(_scaled(hidden, scales, counts), stacked_b, counts)


def prefers_loop(x: Tensor) -> bool:
    """Return whether a product for each group of rows is faster than grouped ones, which stack all matrices."""
    return x.is_cpu


def _groups(
    counts: Sequence[int], of_expert: int, places: Mapping[int, tuple[int, float]], *, stacked: bool
) -> list[LoRAGroup]:
    """Return the groups of rows that are not empty.

    Args:
        counts: of every group, `of_expert` of each expert.
        places: by the group's index in its expert, the adapter's index and its scale.
        stacked: whether the adapters' matrices are stacks of all experts'.
    """
    found = []
    for group, count in enumerate(counts):
        if count:
            expert, index = divmod(group, of_expert)
            place, scale = places.get(index, (None, 1.0))
            found.append(LoRAGroup(count, place, expert if stacked else None, scale))
    return found


def _padded(part: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return a and b with zeros appended up to `rank`, which add nothing."""
    a, b = part
    missing = rank - a.shape[-2]
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else part


def _scaled(hidden: Tensor, scales: Sequence[float], counts: Tensor) -> Tensor:
    """Return rows hidden [N, r] times the scale of the group of each, rounded once."""
    if len({*scales}) == 1:
        return hidden * scales[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    of_groups = to_device_async(torch.tensor(scales, dtype=wide), hidden.device).repeat(counts.shape[0] // len(scales))
    of_rows = of_groups.repeat_interleave(counts, output_size=hidden.shape[0]).unsqueeze(1)
    return (hidden * of_rows).to(hidden.dtype)
