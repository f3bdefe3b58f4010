"""RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) and layer norms (Ba et al. 2016, arXiv:1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.cpu.fused import rms_norm
from archon.models.layers.linear import Role
from archon.parallel.comm import Group, all_reduce_sharded, local


@dataclass(frozen=True)
class NormSpec:
    """Epsilon and factor of a norm: the factor is `offset` + weight, and checkpoints store the weight.

    Attributes:
        rounds_once: in a narrow dtype, round the result once after the factor, as with an offset; otherwise also before
            the factor.
        centered: a layer norm, which subtracts the mean first and rounds once.
        bias: the layer norm has a bias.
    """

    eps: float
    offset: float = 0.0
    rounds_once: bool = False
    centered: bool = False
    bias: bool = False

    def build(self, dim: int, role: Role = "norm") -> RMSNorm | LayerNorm:
        """Return a norm over `dim` features."""
        if self.centered:
            return LayerNorm(dim, self.eps, bias=self.bias, role=role)
        return RMSNorm(dim, self.eps, role=role, offset=self.offset, rounds_once=self.rounds_once)


class RMSNorm(nn.Module):
    """(offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension.

    Statistics are in at least float32. The initial factor is 1.
    """

    def __init__(
        self, dim: int, eps: float, *, role: Role = "norm", offset: float = 0.0, rounds_once: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset, self.rounds_once = eps, offset, rounds_once
        self.role: Role = role

    def factors(self) -> tuple[Tensor, float, float, bool]:
        """Return the arguments of `rms_norm` after x: this rank's weight, eps, offset, `rounds_once`."""
        return local(self.weight), self.eps, self.offset, self.rounds_once

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., dim]."""
        return rms_norm(x, *self.factors())

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (f", offset={self.offset:g}" if self.offset else "")


class LayerNorm(nn.LayerNorm):
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension, with statistics in float32."""

    def __init__(self, dim: int, eps: float, *, bias: bool, role: Role = "norm") -> None:
        super().__init__(dim, eps=eps, bias=bias)
        self.role: Role = role

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., dim]."""
        bias = None if self.bias is None else local(self.bias)
        return F.layer_norm(x, self.normalized_shape, local(self.weight), bias, self.eps)


class FullWidthRMSNorm(RMSNorm):
    """Norm over the features of all `heads` heads together, sharded by heads under tensor parallelism.

    Attributes:
        rows: this rank's entries of a replicated weight, if there are fewer heads than ranks.
    """

    tp: Group | None = None
    rows: slice | None = None

    def __init__(self, heads: int, head_dim: int, spec: NormSpec) -> None:
        super().__init__(
            heads * head_dim, spec.eps, role="heads_norm", offset=spec.offset, rounds_once=spec.rounds_once
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [T, features of this rank] with the statistics over the features of all ranks."""
        if self.tp is None:
            return super().forward(x)
        weight = local(self.weight)
        weight = weight if self.rows is None else weight[self.rows]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # With fewer heads than ranks, each head is on several ranks and counts once for each of them.
        copies = x.shape[-1] * self.tp.size
        mean = all_reduce_sharded(wide.square().sum(-1, keepdim=True), self.tp) / copies
        normed = wide * torch.rsqrt(mean + self.eps)
        if self.offset or self.rounds_once:
            return (normed * (self.offset + weight.to(wide.dtype))).to(x.dtype)
        return normed.to(x.dtype) * weight
