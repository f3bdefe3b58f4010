"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from archon.models.layers.linear import Role


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; the statistics in at least float32, as Qwen does."""

    def __init__(self, dim: int, eps: float, *, role: Role = "norm") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.role: Role = role

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
