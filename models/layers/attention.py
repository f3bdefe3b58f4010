"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions and optional QK norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.meta import AttentionMeta
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu.fused import norm_and_rotate, rotate
from archon.models.layers.linear import Linear, Role, project
from archon.models.layers.norm import FullWidthRMSNorm, LayerNorm, NormSpec, RMSNorm
from archon.models.layers.rope import RopeSpec, Rotation
from archon.models.layers.spec import MixerSpec
from archon.parallel.comm import Group, all_gather, local


@dataclass(frozen=True)
class AttentionLayer(MixerSpec):
    """Grouped-query attention: `n_heads` query heads, `n_kv_heads` key-value heads, `head_dim` features.

    Attributes:
        rope: None for a layer without positions.
        scale: factor on the scores; None for head_dim^(-1/2).
        window: each token attends to itself and the window - 1 tokens before it; None for all.
        bias, out_bias: biases on wq, wk, wv and on wo.
        qk_norm: norms over each head's queries and keys; None for none.
        full_width_qk_norm: normalize over the features of all heads together.
        soft_cap: see `AttentionSpec`.
        sinks: each query head has a learned sink, see `AttentionSpec`.
        gated: multiply a head's output by sigmoid(gate); wq projects the gate next to the query (Qwen3-Next).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    scale: float | None = None
    window: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    full_width_qk_norm: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    gated: bool = False

    def build(self, layer: int, dim: int) -> Attention:
        """See `MixerSpec.build`."""
        return Attention(layer, dim, self)

    def parameters(self, dim: int) -> int:
        """See `MixerSpec.parameters`."""
        return dim * self.head_dim * ((3 if self.gated else 2) * self.n_heads + 2 * self.n_kv_heads)

    @property
    def attention_width(self) -> int:
        """See `MixerSpec.attention_width`."""
        return self.n_heads * self.head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """See `MixerSpec.heads`."""
        return self.n_heads, self.n_kv_heads

    @property
    def cache(self) -> PagedRows:
        """See `MixerSpec.cache`."""
        return PagedRows(self.n_kv_heads, self.head_dim, self.head_dim)


class Attention(nn.Module):
    """Attention layer: wo(attend(rope(norm(wq x)), rope(norm(wk x)), wv x)).

    Shapes: q [T, H, K], k and v [T, G, K], with T tokens, H query heads, G key heads, K features.
    `AttentionMeta.attend` hides packing, caches and kernels.
    """

    parameter_roles: ClassVar[Mapping[str, Role]] = {"sinks": "heads"}
    tp: Group | None = None

    def __init__(self, layer: int, dim: int, layer_spec: AttentionLayer) -> None:
        super().__init__()
        s, self.layer, self.head_dim, self.gated = layer_spec, LayerIndex(layer), layer_spec.head_dim, layer_spec.gated
        q_dim = (2 if s.gated else 1) * s.head_dim
        self.interleaved = s.rope is not None and s.rope.interleaved
        self.spec = AttentionSpec(s.head_dim**-0.5 if s.scale is None else s.scale, s.window, s.soft_cap)
        self.wq = Linear(dim, s.n_heads * q_dim, bias=s.bias, role="column", heads=s.n_heads)
        self.wk = Linear(dim, s.n_kv_heads * s.head_dim, bias=s.bias, role="column", heads=s.n_kv_heads)
        self.wv = Linear(dim, s.n_kv_heads * s.head_dim, bias=s.bias, role="column", heads=s.n_kv_heads)
        self.wo = Linear(s.n_heads * s.head_dim, dim, bias=s.out_bias, role="row")
        self.q_norm, self.k_norm = self._qk_norm(s, s.n_heads), self._qk_norm(s, s.n_kv_heads)
        self.sinks = nn.Parameter(torch.empty(s.n_heads)) if s.sinks else None

    @staticmethod
    def _qk_norm(s: AttentionLayer, heads: int) -> RMSNorm | LayerNorm | None:
        if s.qk_norm is None:
            return None
        if s.full_width_qk_norm:
            return FullWidthRMSNorm(heads, s.head_dim, s.qk_norm)
        return s.qk_norm.build(s.head_dim, "head_norm")

    def _normed(self, norm: RMSNorm | LayerNorm | None, x_THK: Tensor) -> Tensor:
        if norm is None:
            return x_THK
        return norm(x_THK.flatten(-2)).view_as(x_THK) if isinstance(norm, FullWidthRMSNorm) else norm(x_THK)

    def _rotated(self, norm: RMSNorm | LayerNorm | None, x_THK: Tensor, rotation: Rotation | None) -> Tensor:
        """Apply the layer's norm and rotation, if it has them, to x [T, H, K]."""
        if rotation is None:
            return self._normed(norm, x_THK)
        angles = rotation.cos, rotation.sin, self.interleaved
        if type(norm) is RMSNorm:
            return norm_and_rotate(x_THK, norm.factors(), *angles)
        return rotate(self._normed(norm, x_THK), *angles)

    def input_projections(self) -> tuple[Linear, ...]:
        """Return the layers that project the residual stream."""
        return self.wq, self.wk, self.wv

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMeta) -> Tensor:
        """Return [T, dim] for x [T, dim]."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        # 1. Project; the head count comes from the tensor, since a sharded projection holds fewer heads.
        projected = project(x, self.input_projections(), attention.lora_mapping)
        q_THK, k_TGK, v_TGK = (out.unflatten(-1, (-1, self.head_dim)) for out in projected)
        gate_THK = None
        if self.gated:
            q_THK, gate_THK = q_THK.unflatten(1, (-1, 2)).unbind(2)
        # 2. Normalize and rotate queries and keys.
        q_THK, k_TGK = self._rotated(self.q_norm, q_THK, rotation), self._rotated(self.k_norm, k_TGK, rotation)
        if rotation is not None and rotation.query_scale is not None:
            q_THK = q_THK * rotation.query_scale
        # 3. Attend, gate, and project back to the residual stream.
        spec = self.spec if self.sinks is None else replace(self.spec, sinks=local(self.sinks))
        out_THK = attention.attend(self.layer, q_THK, k_TGK, v_TGK, spec)
        if gate_THK is not None:
            out_THK = out_THK * torch.sigmoid(gate_THK)
        return self.wo(out_THK.flatten(-2), attention.lora_mapping)
