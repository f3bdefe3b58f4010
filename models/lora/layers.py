"""LoRA layers (Hu et al. 2022, arXiv:2106.09685): y = W x + scale * b a x.

With a [r, in] and b [out, r] split as W is, tensor parallelism needs no extra collective. A column layer holds all of a
and its rows of b; a row layer holds its columns of a and all of b, and its LoRA term joins the sum that the layer
scatters anyway. Replicated parts get one term of a sum as their gradient.

A matrix may have several LoRAs (`MultiLoRALayer`); each row uses one of them or none.
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
    linear,
    padded_group_width,
    supports_grouped_mm,
)
from archon.models.lora.dora import Magnitude, row_norms, scale_rows
from archon.models.lora.dropout import LoRADropout
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.comm import Group, local
from archon.parallel.transfer import to_device_async


class LoRALayer(nn.Module):
    """LoRA of a linear layer, or of one matrix of every expert.

    Attributes:
        a, b: [r, in] and [out, r]; [E, r, in] and [E, out, r] for E `experts`.
        scale: factor on b a.
        casts_parameters: a and b may be wider than the compute dtype; `parts` rounds them.
        dropout: dropout of its input in training; None without.
        magnitude: the norms of the rows with DoRA; None without.
        fixed_norms: [out], `row_norms` of weights that do not change, in a generator; None to compute them.
        enabled: whether the layer adds it; see `archon.models.lora.model.disable_lora`.
    """

    casts_parameters: ClassVar[bool] = True
    dropout: LoRADropout | None = None
    fixed_norms: Tensor | None = None
    enabled = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scale: float,
        experts: int | None = None,
        *,
        dora: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.magnitude = Magnitude(out_features) if dora else None
        stack = () if experts is None else (experts,)
        self.a = nn.Parameter(torch.empty(*stack, rank, in_features))
        self.b = nn.Parameter(torch.empty(*stack, out_features, rank))

    def parts(self, dtype: torch.dtype, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return this rank's a and b in the compute dtype; `rows` are its rows of b for a replicated head."""
        a = local(self.a)
        b = local(self.b)
        return a.to(dtype), (b if rows is None else b[rows]).to(dtype)

    def add_dora(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group | None = None,
        rows: slice | None = None,
        *,
        dropped: bool = False,
    ) -> Tensor:
        """Return out [T, out] with DoRA added, of a layer with magnitudes.

        Args:
            out: the output of the frozen layer.
            x: [T, in], the LoRA's input.
            weight: [out, in], the frozen matrix.
            bias: [out], the part of `out` that is not scaled; None without.
            group: see `row_norms`.
            rows: see `parts`.
            dropped: whether dropout changed x, which is the input of `out` otherwise.
        """
        assert self.magnitude is not None
        a, b = self.parts(x.dtype, rows)
        norms = row_norms(weight, a, b, self.scale, group) if self.fixed_norms is None else self.fixed_norms
        # Near 1 a narrow dtype has no room for the factor of a row; it has for its distance from 1.
        excess = self.magnitude(norms, rows).to(out.dtype)
        if dropped:
            term = linear(linear(x, a) * self.scale, b)
            return torch.addcmul(out + term, linear(x, weight) + term, excess)
        product = torch.addmm(out if bias is None else out - bias, linear(x, a), b.t(), alpha=self.scale)
        scaled = torch.addcmul(product, product, excess)
        return scaled if bias is None else scaled.add_(bias)

    def merge(self, weight: Tensor) -> Tensor:
        """Return the matrix with this LoRA merged, in the dtype of the weight; all parts are whole."""
        weight = weight + self.scale * (self.b @ self.a)
        return weight if self.magnitude is None else scale_rows(weight, self.magnitude.weight)

    def add_to_experts(self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor) -> Tensor:
        """Add the LoRA term of rows x [N, in], sorted by expert, to out [N, out]; `counts` int64 [E], no `names`."""
        a, b = self.parts(x.dtype)
        a, b = _padded((a, b), padded_group_width(a.shape[1], x))
        return out + grouped_linear(grouped_linear(x, a, counts) * self.scale, b, counts)

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.a.shape)}, {tuple(self.b.shape)}, scale={self.scale:g}"


class MultiLoRALayer(nn.ModuleDict):
    """Several LoRAs of one matrix, or of one matrix of every expert, by name; ranks and scales may differ."""

    enabled = True

    def forward(self, out: Tensor, x: Tensor, lora_mapping: LoRAMapping, rows: slice | None = None) -> Tensor:
        """Add each row's LoRA term for x [T, in] to out [T, out]."""
        if not self._has_any(lora_mapping.names):
            return out
        added = self._add_to(
            lora_mapping.sort(out), lora_mapping.sort(x), lora_mapping.names, lora_mapping.counts, rows
        )
        return lora_mapping.unsort(added)

    def part(self, name: str) -> LoRALayer | None:
        """Return the LoRA with this name, or None."""
        lora = getattr(self, name, None)
        return lora if isinstance(lora, LoRALayer) else None

    def add_to_experts(self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor) -> Tensor:
        """Add the LoRA terms of rows x [N, in], sorted by expert, then LoRA, to out [N, out].

        `counts` int64 [E (n + 1)] holds the rows of each of the n LoRAs in each expert, rows without one last. A LoRA
        that this matrix lacks adds nothing.
        """
        return self._add_to(out, x, names, counts) if self._has_any(names) else out

    def _has_any(self, names: Sequence[str]) -> bool:
        return any(name in self for name in names)

    def _add_to(
        self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor, rows: slice | None = None
    ) -> Tensor:
        """Add the LoRA terms of rows x [N, in], sorted by group, to out [N, out].

        Every LoRA of `names` gets a gradient, 0 without rows, because ranks that sum gradients need the same ones.
        """
        loras = [self.part(name) for name in names]
        present = [(index, lora) for index, lora in enumerate(loras) if lora is not None]
        parts = [lora.parts(x.dtype, rows) for _, lora in present]
        a, b = parts[0]
        experts = a.shape[0] if a.dim() == 3 else 1
        groups_per_expert = counts.shape[0] // experts
        # 1. A loop over groups: on a CPU, and for shapes that `grouped_mm` does not support.
        if prefers_loop(x) or not supports_grouped_mm(x, a.shape[-1], b.shape[-2]):
            places = {index: (place, lora.scale) for place, (index, lora) in enumerate(present)}
            groups = _groups(counts.tolist(), groups_per_expert, places, stacked=a.dim() == 3)
            return add_loras(out, x, groups, parts)
        # 2. Grouped matmuls over all matrices, padded to one rank; groups without a LoRA have zero matrices.
        rank = padded_group_width(max(part[0].shape[-2] for part in parts), x)
        nothing = a.new_zeros(*a.shape[:-2], 0, a.shape[-1]), b.new_zeros(*b.shape[:-1], 0)
        group_parts = [nothing] * groups_per_expert
        scales = [present[0][1].scale] * groups_per_expert  # rows without a LoRA accept any scale
        for (index, lora), part in zip(present, parts, strict=True):
            group_parts[index], scales[index] = part, lora.scale
        pairs = [_padded(part, rank) for part in group_parts]
        stacked_a, stacked_b = (torch.stack(side, dim=-3).flatten(0, -3) for side in zip(*pairs, strict=True))
        hidden = grouped_linear(x, stacked_a, counts)
        return out + grouped_linear(_scaled(hidden, scales, counts), stacked_b, counts)


def prefers_loop(x: Tensor) -> bool:
    """Return whether one matmul per group is faster than grouped matmuls, which stack all matrices."""
    return x.is_cpu


def _groups(
    counts: Sequence[int], groups_per_expert: int, places: Mapping[int, tuple[int, float]], *, stacked: bool
) -> list[LoRAGroup]:
    """Return the nonempty groups of rows.

    `places` holds the index and scale of a LoRA, by its group's index within the expert.
    """
    groups = []
    for group, count in enumerate(counts):
        if count:
            expert, index = divmod(group, groups_per_expert)
            place, scale = places.get(index, (None, 1.0))
            groups.append(LoRAGroup(count, place, expert if stacked else None, scale))
    return groups


def _padded(part: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return a and b padded with zeros to `rank`."""
    a, b = part
    missing = rank - a.shape[-2]
    return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else part


def _scaled(hidden: Tensor, scales: Sequence[float], counts: Tensor) -> Tensor:
    """Return rows hidden [N, r] times the scale of their group, rounded once."""
    if len({*scales}) == 1:
        return hidden * scales[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale_G = to_device_async(torch.tensor(scales, dtype=wide), hidden.device).repeat(counts.shape[0] // len(scales))
    scale_N = scale_G.repeat_interleave(counts, output_size=hidden.shape[0]).unsqueeze(1)
    return (hidden * scale_N).to(hidden.dtype)
