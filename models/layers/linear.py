"""Linear and embedding layers that declare their role to the parallel plan."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from archon.models.layers.matmul import linear

# column: output features are split; row: input features are split; head_norm: a norm over one head's features, whose
# input is split by heads; the others speak for themselves.
Role = Literal["column", "row", "norm", "head_norm", "router", "experts", "embedding", "head", "value_head"]


class Linear(nn.Linear):
    """`nn.Linear` with a role. The weight is [out_features, in_features], contiguous or a transposed view."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, role: Role) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role: Role = role

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Token embedding [vocab, dim]; the row of `padding_idx`, if given, receives no gradient from lookups."""

    role: Role = "embedding"
