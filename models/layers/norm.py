"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from archon.models.layers.fused import rms_norm
from archon.models.layers.linear import Role
from archon.parallel.comm import local


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, with statistics in at least float32, as in Qwen."""

    def __init__(self, dim: int, eps: float, *, role: Role = "norm") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.role: Role = role

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
