"""Causal depthwise convolution over packed documents: each channel sees itself and the few tokens before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.attention.packed.documents import PackedDocuments
from archon.models.layers.linear import Role
from archon.parallel.comm import local


class ShortConvolution(nn.Module):
    """The weights of a convolution of `heads * features` channels: `kernel_size` of each, the last for the token
    itself.

    Tensor parallelism shards it by heads; `rows` are those of a rank where there are fewer heads than ranks.
    """

    role: Role = "column"
    rows: slice | None = None

    def __init__(self, heads: int, features: int, kernel_size: int) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        self.weight = nn.Parameter(torch.empty(heads * features, 1, kernel_size))

    def forward(self) -> Tensor:
        """Returns this rank's weights [heads, features, taps]."""
        weight = local(self.weight)
        return (weight if self.rows is None else weight[self.rows]).view(-1, self.features, weight.shape[-1])

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, heads={self.heads}"


def causal_convolution(
    x: Tensor, weight: Tensor, documents: PackedDocuments, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns y [T, C], y_t = sum over i of weight[:, n - 1 - i] x_{t - i} within each document, and the last inputs.

    Args:
        x: [T, C], the tokens of B documents.
        weight: [C, n].
        history: [B, n - 1, C], the inputs before each document's first token; zeros by default.

    The second result is `history` [B, n - 1, C] for the tokens after these.
    """
    gap = weight.shape[1] - 1
    spaced = documents.spaced(gap)
    # Before each document are `gap` rows of its own, so that no window reaches into the document before it.
    padded = x.new_zeros(spaced.length, x.shape[1]).index_copy(0, spaced.rows, x)
    if history is not None:
        padded = padded.index_copy(0, spaced.history_rows, history.flatten(0, 1).to(x.dtype))
    out = F.conv1d(padded.t().unsqueeze(0), weight.unsqueeze(1), groups=x.shape[1]).squeeze(0).t()
    return out.index_select(0, spaced.rows - gap), padded.index_select(0, spaced.last_rows).unflatten(
        0, (len(documents.lengths), gap)
    )
