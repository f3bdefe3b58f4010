"""The Qwen3 that the tests of the RL layer train, as sizes of a config.json and as a model."""

from __future__ import annotations

from typing import Any

import torch

from archon.models.base import BaseArchonModel
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs

SMALL_QWEN3: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def small_model(vocab_size: int, max_seq_len: int = 64) -> BaseArchonModel:
    """A plain model of these sizes, always with the same weights."""
    torch.manual_seed(0)
    args = Qwen3ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=48,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        initializer_range=0.3,
    )
    built = Qwen3Model(args)
    built.init_weights()
    built.init_buffers("cpu")
    return built
