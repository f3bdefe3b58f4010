"""DoRA (Liu et al. 2024, arXiv:2402.09353): y = m / |W + scale * b a| (W + scale * b a) x, as in PEFT.

m is trained, and |…| is the norm of each output row. The norm is a constant of the gradient (section 4.3). A bias of
the layer is not scaled.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from archon.models.layers.matmul import linear
from archon.parallel.comm import Group, all_reduce, local


class Magnitude(nn.Module):
    """The trained norms m [out] of a matrix's rows, at least float32 in any compute dtype.

    A rounded m would move every row of a bfloat16 model by up to 0.4 % before the first step.
    """

    full_precision: ClassVar[bool] = True
    casts_parameters: ClassVar[bool] = True

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features))

    def forward(self, norms: Tensor, rows: slice | None = None) -> Tensor:
        """Return m / norms - 1 [out] for this rank's norms; `rows` are its rows of a replicated head."""
        magnitude = local(self.weight)
        return (magnitude if rows is None else magnitude[rows]) / norms - 1


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, group: Group | None = None) -> Tensor:
    """Return the norms [out] of the rows of weight [out, in] + scale * b a, in at least float32.

    The sum is never materialized: a row w of the weight with the row v of b has the squared norm
    |w|² + 2 scale v·(a w) + scale² v·(a aᵀ v).

    Args:
        weight: the frozen matrix.
        a: [r, in].
        b: [out, r].
        scale: factor on b a.
        group: ranks that hold other columns of the weight and of a; None for all columns here.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    products, a, b = linear(weight, a).to(wide), a.to(wide), b.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    squares += scale * (b * (2 * products + scale * (b @ (a @ a.t())))).sum(1)
    return (squares if group is None else all_reduce(squares, group)).sqrt()


def scale_rows(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Return a matrix [out, in] with its rows scaled to the norms magnitude [out]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    factor = magnitude.to(weight.device, wide) / torch.linalg.vector_norm(weight, dim=1, dtype=wide)
    return (weight * factor.unsqueeze(1)).to(weight.dtype)
