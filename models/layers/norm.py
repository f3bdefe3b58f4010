"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archon.models.layers.fused import rms_norm
from archon.models.layers.linear import Role
from archon.parallel.comm import local


@dataclass(frozen=True)
class NormSpec:
    """A norm with epsilon `eps`; its factor is `offset` + weight, and checkpoints store the weight."""

    eps: float
    offset: float = 0.0

    def build(self, dim: int, role: Role = "norm") -> RMSNorm:
        """Returns the norm of vectors of `dim` features."""
        return RMSNorm(dim, self.eps, role=role, offset=self.offset)


class RMSNorm(nn.Module):
    """(offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension, with statistics in at least float32.

    The initial factor is 1.
    """

    def __init__(self, dim: int, eps: float, *, role: Role = "norm", offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset
        self.role: Role = role

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps, self.offset)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (f", offset={self.offset:g}" if self.offset else "")
