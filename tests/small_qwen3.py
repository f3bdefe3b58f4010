"""The sizes of the Qwen3 that the tests of the RL layer train."""

from typing import Any

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
