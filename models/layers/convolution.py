"""Causal depthwise convolution over packed documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.attention.packed.documents import PackedDocuments
from archon.models.layers.linear import Role
from archon.parallel.comm import local


class ShortConvolution(nn.Module):
    """Weights of a depthwise convolution over `heads * features` channels.

    Each channel has `kernel_size` taps; the last one multiplies the token itself.

    Attributes:
        rows: this rank's rows of a replicated weight, if there are fewer heads than ranks.
    """

    role: Role = "column"
    rows: slice | None = None

    def __init__(self, heads: int, features: int, kernel_size: int) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        self.weight = nn.Parameter(torch.empty(heads * features, 1, kernel_size))

    def forward(self) -> Tensor:
        """Return this rank's weights [heads, features, taps]."""
        weight = local(self.weight)
        return (weight if self.rows is None else weight[self.rows]).view(-1, self.features, weight.shape[-1])

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.weight.shape)}, heads={self.heads}"


def causal_convolution(
    x: Tensor, weight: Tensor, documents: PackedDocuments, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute y_t = sum over i of weight[:, n - 1 - i] x_{t - i} within each document.

    Args:
        x: [T, C], the tokens of B documents.
        weight: [C, n].
        documents: boundaries of the B documents.
        history: [B, n - 1, C], the inputs before each document's first token; zeros by default.

    Returns:
        y [T, C], and the `history` [B, n - 1, C] for the next tokens.
    """
    gap = weight.shape[1] - 1
    spaced = documents.spaced(gap)
    # `gap` rows before each document keep its windows out of the previous document.
    padded = x.new_zeros(spaced.length, x.shape[1]).index_copy(0, spaced.rows, x)
    if history is not None:
        padded = padded.index_copy(0, spaced.history_rows, history.flatten(0, 1).to(x.dtype))
    out = F.conv1d(padded.t().unsqueeze(0), weight.unsqueeze(1), groups=x.shape[1]).squeeze(0).t()
    return out.index_select(0, spaced.rows - gap), padded.index_select(0, spaced.last_rows).unflatten(
        0, (len(documents.lengths), gap)
    )
