"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archon.models.cpu.fused import rms_norm
from archon.models.layers.linear import Role
from archon.parallel.comm import Group, all_reduce_sharded, local


@dataclass(frozen=True)
class NormSpec:
    """A norm with epsilon `eps`; its factor is `offset` + weight, and checkpoints store the weight.

    `rounds_once`: in a narrow dtype the result is rounded once, after the factor, as it is with an offset; otherwise
    also before it.
    """

    eps: float
    offset: float = 0.0
    rounds_once: bool = False

    def build(self, dim: int, role: Role = "norm") -> RMSNorm:
        """Returns the norm of vectors of `dim` features."""
        return RMSNorm(dim, self.eps, role=role, offset=self.offset, rounds_once=self.rounds_once)

    def build_full_width(self, heads: int, head_dim: int) -> FullWidthRMSNorm:
        """Returns one norm over the features of all heads."""
        return FullWidthRMSNorm(heads, head_dim, self)


class RMSNorm(nn.Module):
    """(offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension, with statistics in at least float32.

    The initial factor is 1.
    """

    def __init__(
        self, dim: int, eps: float, *, role: Role = "norm", offset: float = 0.0, rounds_once: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset, self.rounds_once = eps, offset, rounds_once
        self.role: Role = role

    def factors(self) -> tuple[Tensor, float, float, bool]:
        """Returns what `rms_norm` takes next to x."""
        return local(self.weight), self.eps, self.offset, self.rounds_once

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, *self.factors())

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (f", offset={self.offset:g}" if self.offset else "")


class FullWidthRMSNorm(RMSNorm):
    """A norm over the features of all `heads` heads together, which tensor parallelism shards by heads.

    Attributes:
        rows: the entries that this rank uses of a replicated weight with fewer heads than ranks.
    """

    tp: Group | None = None
    rows: slice | None = None

    def __init__(self, heads: int, head_dim: int, spec: NormSpec) -> None:
        super().__init__(
            heads * head_dim, spec.eps, role="heads_norm", offset=spec.offset, rounds_once=spec.rounds_once
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [T, this rank's features] with the statistics of the features of all ranks."""
        if self.tp is None:
            return super().forward(x)
        weight = local(self.weight)
        weight = weight if self.rows is None else weight[self.rows]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # With fewer heads than ranks each is on several ranks, and its squares are in the sum as often.
        copies = x.shape[-1] * self.tp.size
        mean = all_reduce_sharded(wide.square().sum(-1, keepdim=True), self.tp) / copies
        normed = wide * torch.rsqrt(mean + self.eps)
        if self.offset or self.rounds_once:
            return (normed * (self.offset + weight.to(wide.dtype))).to(x.dtype)
        return normed.to(x.dtype) * weight
