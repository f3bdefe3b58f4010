"""Low-rank adapters (LoRA: Hu et al. 2022, arXiv:2106.09685), which layers add to their products.

An adapter adds scale * b a x to a product W x, with a [r, in] and b [out, r]. It is split as W is: for a column product
each rank has all of a and its rows of b, for a row product its columns of a and all of b. What all ranks have gets a
term of a sum as its gradient, and what a rank adds to a row product is a term of the sum that the layer scatters
anyway. So adapters need no collective of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from archon.models.layers.matmul import linear
from archon.parallel.comm import local


class LowRank(nn.Module):
    """The adapter of a linear layer, or that of one matrix of every expert.

    Attributes:
        a, b: [r, in] and [out, r]; [E, r, in] and [E, out, r] for `experts` E.
        scale: factor on b a.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, scale: float, experts: int | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        stack = () if experts is None else (experts,)
        self.a = nn.Parameter(torch.empty(*stack, rank, in_features))
        self.b = nn.Parameter(torch.empty(*stack, out_features, rank))

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """Returns [T, out] for x [T, in] of a linear layer; `rows` of b are this rank's of a shared head."""
        b = local(self.b)
        return linear(linear(x, local(self.a)) * self.scale, b if rows is None else b[rows])

    def extra_repr(self) -> str:
        return f"{tuple(self.a.shape)}, {tuple(self.b.shape)}, scale={self.scale:g}"
