"""Logits and every gradient equal transformers', over random configurations of each family (CORRECTNESS.md, Parity)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.models.reference import (
    ROPE_KINDS,
    build_pair,
    pack,
    random_config,
    random_lengths,
    reference_logits,
    relative,
)
from tests.tolerances import PARITY_FP32

SEEDS = range(48)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_every_gradient_equal_transformers(seed: int) -> None:
    config = random_config(seed)
    reference, model, adapter = build_pair(config, attention="eager" if seed % 3 else "sdpa", seed=seed)
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, max_seqlen = pack(lengths, config.vocab_size, seed)

    logits = model(tokens, positions, cu_seqlens, max_seqlen)
    expected = reference_logits(reference, tokens, lengths)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()

    assert relative(logits, expected) <= PARITY_FP32
    gradients = {name: p.grad for name, p in model.named_parameters()}
    reached = set()
    for hf_name, parameter in reference.named_parameters():
        target = adapter.hf_to_native(hf_name)
        assert parameter.grad.abs().max() > 0, hf_name
        assert relative(gradients[target.name], parameter.grad) <= PARITY_FP32, hf_name
        reached.add(target.name)
    assert reached == set(gradients)


def test_the_configurations_cover_what_they_claim() -> None:
    configs = [random_config(seed) for seed in SEEDS]
    lengths = [random_lengths(seed) for seed in SEEDS]
    assert len(configs) >= 40
    assert all(
        count >= 3 for count in Counter((c.model_type, c.rope_parameters["rope_type"]) for c in configs).values()
    )
    assert {c.rope_parameters["rope_type"] for c in configs} == set(ROPE_KINDS)
    assert sum(max(n) > c.max_position_embeddings for c, n in zip(configs, lengths, strict=True)) >= 10
    for kind in ("dynamic", "longrope"):
        beyond = [
            max(n) > c.rope_parameters.get("original_max_position_embeddings", c.max_position_embeddings)
            for c, n in zip(configs, lengths, strict=True)
            if c.rope_parameters["rope_type"] == kind
        ]
        assert sum(beyond) >= 3
    for feature in (
        lambda c: c.tie_word_embeddings,
        lambda c: not c.tie_word_embeddings,
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        lambda c: c.num_attention_heads == c.num_key_value_heads,
        lambda c: 1 < c.num_key_value_heads < c.num_attention_heads,
        lambda c: c.num_key_value_heads == 1 < c.num_attention_heads,
        lambda c: c.model_type == "qwen3" and c.attention_bias,
        lambda c: "sliding_attention" in c.layer_types and "full_attention" in c.layer_types,
        lambda c: c.hidden_act != "silu",
    ):
        assert sum(map(feature, configs)) >= 5
