"""Functions of AReaL's guide to adding a model that its unit tests and specs name."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.layers.rope import RopeConfig, RopeSpec, RotaryEmbedding
from archon.parallel.pipeline import prune

pipeline_llm = prune  # a spec's `pipelining_fn`, which is also what None stands for


def precompute_rope_cache(dim: int, max_seq_len: int, base: float = 1_000_000.0) -> Tensor:
    """Return cosines and sines of every position, float32 [max_seq_len, 2 · dim]: cos twice over dim / 2, then sin.

    Models do not use it; they compute the rotation of the tokens of a batch.
    """
    rotation = RotaryEmbedding(RopeSpec(dim, base, RopeConfig(), max_seq_len))(torch.arange(max_seq_len), torch.float32)
    cos, sin = rotation.cos.squeeze(1), rotation.sin.squeeze(1)
    return torch.cat([cos, cos, sin, sin], dim=-1)
