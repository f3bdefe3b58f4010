"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions and optional QK norm."""

from __future__ import annotations

from torch import Tensor, nn

from archon.models.attention.meta import AttentionMeta
from archon.models.attention.spec import AttentionSpec
from archon.models.layers.fused import rotate
from archon.models.layers.linear import Linear
from archon.models.layers.norm import RMSNorm
from archon.parallel.comm import Group, all_gather


class Attention(nn.Module):
    """Projects and rotates queries, keys and values for `AttentionMeta.attend`; knows nothing of packing or kernels.

    Args:
        layer: index of the layer, which a cache needs.
        bias, out_bias: biases on wq, wk, wv and on wo.
        qk_norm_eps: epsilon of the RMS norms over each head's queries and keys; None for a model without them.
        window: each token sees itself and the window - 1 tokens before it; None for all.
    """

    tp: Group | None = None

    def __init__(
        self,
        layer: int,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.spec = AttentionSpec(scale=head_dim**-0.5, window=window)
        self.wq = Linear(dim, n_heads * head_dim, bias=bias, role="column", heads=n_heads)
        self.wk = Linear(dim, n_kv_heads * head_dim, bias=bias, role="column", heads=n_kv_heads)
        self.wv = Linear(dim, n_kv_heads * head_dim, bias=bias, role="column", heads=n_kv_heads)
        self.wo = Linear(n_heads * head_dim, dim, bias=out_bias, role="row")
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, role="head_norm")
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, role="head_norm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionMeta) -> Tensor:
        """[T, dim] to [T, dim]; cos and sin [T, 1, head_dim / 2] come from `RotaryEmbedding`."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        # The head count is read off the tensor, since a sharded projection holds fewer heads.
        q_THK, k_TGK, v_TGK = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        q_THK, k_TGK = rotate(q_THK, cos, sin), rotate(k_TGK, cos, sin)
        out_THK = attention.attend(self.layer, q_THK, k_TGK, v_TGK, self.spec)
        return self.wo(out_THK.flatten(-2))
