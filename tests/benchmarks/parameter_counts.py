"""Parameter counts of the benchmarks' models, by formula."""

from __future__ import annotations

from typing import Any


def parameters_of(config: dict[str, Any]) -> int:
    """Return the parameters of a Qwen3, or of a Qwen3-MoE all of whose layers have experts."""
    dim, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * dim * head_dim * (heads + kv_heads) + 2 * head_dim
    network = 3 * dim * config["intermediate_size"]
    if experts := config.get("num_experts", 0):
        network = experts * (3 * dim * config["moe_intermediate_size"] + dim)
    embeddings = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * dim
    return embeddings + config["num_hidden_layers"] * (attention + network + 2 * dim) + dim
