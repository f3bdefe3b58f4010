"""Functions from the unit tests and specs of AReaL's guide to adding a model."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.layers.rope import RopeConfig, RopeSpec, RotaryEmbedding
from archon.parallel.pipeline import prune

pipeline_llm = prune  # the default `pipelining_fn` of a spec


def precompute_rope_cache(dim: int, max_seq_len: int, base: float = 1_000_000.0) -> Tensor:
    """Return cosines and sines of every position, float32 [max_seq_len, 2 · dim]: [cos, cos, sin, sin].

    It is for comparisons in tests; models compute the rotation of each batch.
    """
    rotation = RotaryEmbedding(RopeSpec(dim, base, RopeConfig(), max_seq_len))(torch.arange(max_seq_len), torch.float32)
    cos, sin = rotation.cos.squeeze(1), rotation.sin.squeeze(1)
    return torch.cat([cos, cos, sin, sin], dim=-1)
