"""Multi-token prediction (MTP): layers after the trunk that predict the tokens after the next one.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. With h^0_t the trunk's hidden state at token t of a document, after the
final norm, layer k = 1 .. K computes

    h^k_t = norm(block(M [norm(Emb(x_{t+k})); norm(h^{k-1}_t)]))

and the head predicts token x_{t+k+1} from h^k_t. All layers use the embedding and the head of the trunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archon.models.attention.meta import AttentionMeta
from archon.models.layers.linear import Linear
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import Rotation
from archon.parallel.torch_private import register_dataclass

MTP_PREFIX = "mtp."
"""Prefix of the names of MTP layers' parameters."""


@dataclass(frozen=True, eq=False)
class MTPInputs:
    """Inputs of the MTP layers for T packed tokens; entry k - 1 of each attribute belongs to layer k.

    Attributes:
        tokens: int [T], token t + k of the document of token t; any token after the document's end.
        labels: int64 [T], token t + k + 1 of the document, -100 if it is not trained.
        label_rows: int64 [n], indices of labels other than -100.
    """

    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    label_rows: tuple[Tensor, ...]


# FSDP finds the tensors in the arguments of a forward by pytree.
register_dataclass(MTPInputs)


class MTPLayer(nn.Module):
    """One MTP layer: norms of its two inputs, their projection, a block of the family, and a final norm."""

    def __init__(self, block: nn.Module, norm: NormSpec, dim: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = norm.build(dim), norm.build(dim)
        # Replicated under tensor parallelism: each rank projects its tokens.
        self.eh_proj = Linear(2 * dim, dim, bias=False, role="latent")
        self.block = block
        self.norm = norm.build(dim)

    def forward(self, embedding: Tensor, hidden: Tensor, rotation: Rotation | None, attention: AttentionMeta) -> Tensor:
        """Return h^k [T, dim] for the embeddings [T, dim] of tokens t + k and h^(k-1) [T, dim]."""
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1))
        out = self.block(x, rotation, attention)
        return self.norm(out[0] if isinstance(out, tuple) else out)  # an MoE block also returns router statistics
