"""Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1): a cache of one latent for all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import AttentionMeta
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu.fused import rotate
from archon.models.layers.linear import Linear
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec, Rotation, yarn_mscale
from archon.models.layers.spec import MixerSpec
from archon.parallel.comm import Group, all_gather


@dataclass(frozen=True)
class LatentLayer(MixerSpec):
    """Latent attention of `n_heads` heads: keys and values expand from one latent per token.

        c, r = wkv_a x                    latent c [kv_rank], shared rotated key features r [rope.dim]
        k_h = [K_h norm(c), rope(r)]      v_h = V_h norm(c), with K_h and V_h in wkv_b
        q = wq_b norm(wq_a x), or wq x if q_rank is 0

    Attributes:
        kv_rank: features of the latent.
        key_features: unrotated features of a head's query and key.
        value_features: features of a head's value.
        rope: rotation of `rope.dim` further features of queries and of the shared key.
        norm: norm of the latents.
        q_rank: features of the query latent; 0 projects queries directly.
        bias: biases on the compressing matrices and on wo.
    """

    n_heads: int
    kv_rank: int
    key_features: int
    value_features: int
    rope: RopeSpec
    norm: NormSpec
    q_rank: int = 0
    bias: bool = False
    window: None = None

    @property
    def q_features(self) -> int:
        """Features of a head's query."""
        return self.key_features + self.rope.dim

    @property
    def scale(self) -> float:
        """Factor on the scores: q_features^(-1/2) times the square of YaRN's `mscale_all_dim` factor."""
        scaling = self.rope.scaling
        factor = yarn_mscale(scaling, self.rope.max_seq_len, scaling.mscale_all_dim) if scaling.mscale_all_dim else 1.0
        return self.q_features**-0.5 * factor**2

    def build(self, layer: int, dim: int) -> LatentAttention:
        """See `MixerSpec.build`."""
        return LatentAttention(layer, dim, self)

    def parameters(self, dim: int) -> int:
        """See `MixerSpec.parameters`."""
        queries = self.n_heads * self.q_features
        count = self.q_rank * (dim + queries) if self.q_rank else dim * queries
        count += dim * (self.kv_rank + self.rope.dim)
        count += self.kv_rank * self.n_heads * (self.key_features + self.value_features)
        return count + self.n_heads * self.value_features * dim

    @property
    def attention_width(self) -> int:
        """See `MixerSpec.attention_width`."""
        return self.n_heads * (self.q_features + self.value_features) // 2

    @property
    def heads(self) -> tuple[int, int]:
        """See `MixerSpec.heads`."""
        return self.n_heads, self.n_heads

    @property
    def cache(self) -> PagedRows:
        """See `MixerSpec.cache`."""
        return PagedRows(1, self.kv_rank + self.rope.dim, self.kv_rank, values_in_keys=True)


class LatentAttention(nn.Module):
    """Attention module of `LatentLayer`."""

    tp: Group | None = None

    def __init__(self, layer: int, dim: int, layer_spec: LatentLayer) -> None:
        super().__init__()
        s, self.layer, self.layer_spec = layer_spec, LayerIndex(layer), layer_spec
        self.spec = AttentionSpec(scale=s.scale)
        queries = s.n_heads * s.q_features
        self.wq = None if s.q_rank else Linear(dim, queries, bias=False, role="column", heads=s.n_heads)
        self.wq_a = Linear(dim, s.q_rank, bias=s.bias, role="latent") if s.q_rank else None
        self.q_a_norm = s.norm.build(s.q_rank) if s.q_rank else None
        self.wq_b = Linear(s.q_rank, queries, bias=False, role="column", heads=s.n_heads) if s.q_rank else None
        self.wkv_a = Linear(dim, s.kv_rank + s.rope.dim, bias=s.bias, role="latent")
        self.kv_a_norm = s.norm.build(s.kv_rank)
        expanded = s.n_heads * (s.key_features + s.value_features)
        self.wkv_b = Linear(s.kv_rank, expanded, bias=False, role="column", heads=s.n_heads)
        # If context parallelism gathers latents, each rank's gradient is one term of a sum and must not be rounded.
        self.wkv_b.quantizable = False
        self.wo = Linear(s.n_heads * s.value_features, dim, bias=s.bias, role="row")

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMeta) -> Tensor:
        """Return [T, dim] for x [T, dim].

        Under tensor parallelism each rank compresses its token shard and gathers the latents. The latents' gradients
        are then summed over the heads of all ranks, and the weights' gradients over the token shards.
        """
        assert rotation is not None
        s, lora_mapping = self.layer_spec, attention.lora_mapping
        # 1. Compress the tokens of this rank, and gather the latents of all ranks.
        latents, k_rot = self.wkv_a(x, lora_mapping).split((s.kv_rank, s.rope.dim), dim=-1)
        rows = torch.cat((self.kv_a_norm(latents), k_rot), dim=-1)
        queries = x if self.wq_a is None or self.q_a_norm is None else self.q_a_norm(self.wq_a(x, lora_mapping))
        if self.tp is not None:
            rows, queries = all_gather(rows, self.tp), all_gather(queries, self.tp)
        # 2. Expand the queries, and rotate their last features and the shared key features.
        project = self.wq or self.wq_b
        assert project is not None
        q_THK = project(queries, lora_mapping).unflatten(-1, (-1, s.q_features))
        q_THK, q_rot = q_THK.split((s.key_features, s.rope.dim), dim=-1)
        latents, k_rot = rows.unsqueeze(1).split((s.kv_rank, s.rope.dim), dim=-1)
        q_rot, k_rot = (rotate(x, rotation.cos, rotation.sin, s.rope.interleaved) for x in (q_rot, k_rot))
        q_THK = torch.cat((q_THK, q_rot), dim=-1)
        if rotation.query_scale is not None:
            q_THK = q_THK * rotation.query_scale
        # 3. Attend; training expands the keys, decoding attends to the latents themselves.
        keys = LatentKeys(
            torch.cat((latents, k_rot), dim=-1), self.wkv_b, s.key_features, s.value_features, lora_mapping
        )
        return self.wo(attention.attend_latent(self.layer, q_THK, keys, self.spec).flatten(-2), lora_mapping)
