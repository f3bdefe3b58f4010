"""Logits and every gradient equal transformers', over random configurations of each family (CORRECTNESS.md, Parity)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.models.reference import (
    FIRST_MOE_SEED,
    ROPE_KINDS,
    build_pair,
    checkpoint_tensors,
    pack,
    random_config,
    random_lengths,
    reference_logits,
    relative,
)
from tests.tolerances import PARITY_FP32, PARITY_FP64

MOE_SEEDS = range(FIRST_MOE_SEED, FIRST_MOE_SEED + 18)
SEEDS = [*range(48), *MOE_SEEDS]


DENSE_FAMILIES = ("llama", "mistral")


def check(seed: int, dtype: torch.dtype, tolerance: float, family: str | None = None) -> None:
    config = random_config(seed, family)
    reference, model, adapter = build_pair(config, attention="eager" if seed % 3 else "sdpa", seed=seed, dtype=dtype)
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, max_seqlen = pack(lengths, config.vocab_size, seed)

    logits = model(tokens, positions, cu_seqlens, max_seqlen)
    expected = reference_logits(reference, tokens, lengths)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()

    assert relative(logits, expected) <= tolerance
    wanted = adapter.from_hf(checkpoint_tensors(reference, gradients=True))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        assert relative(gradients[name], gradient) <= tolerance, name


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_every_gradient_equal_transformers(seed: int) -> None:
    check(seed, torch.float32, PARITY_FP32)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("seed", range(18))
def test_every_dense_family_computes_what_transformers_does(family: str, seed: int) -> None:
    check(seed, torch.float32, PARITY_FP32, family)


@pytest.mark.parametrize("seed", MOE_SEEDS)
def test_in_float64_too(seed: int) -> None:
    """Routing that differs for one token in a thousand would pass for rounding in float32."""
    check(seed, torch.float64, PARITY_FP64)


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
        lambda c: {"sliding_attention", "full_attention"} <= {*getattr(c, "layer_types", ())},
        lambda c: c.hidden_act != "silu",
    ):
        assert sum(map(feature, configs)) >= 5


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_the_configurations_of_a_family_cover_its_features(family: str) -> None:
    configs = [random_config(seed, family) for seed in range(18)]
    assert Counter(c.rope_parameters["rope_type"] for c in configs) == dict.fromkeys(ROPE_KINDS, 3)
    features = [
        lambda c: c.tie_word_embeddings,
        lambda c: not c.tie_word_embeddings,
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        lambda c: 1 < c.num_key_value_heads < c.num_attention_heads,
        lambda c: c.hidden_act != "silu",
    ]
    own = {
        "llama": [lambda c: c.attention_bias, lambda c: not c.attention_bias],
        "mistral": [lambda c: c.sliding_window is None, lambda c: c.sliding_window is not None],
    }
    for feature in features + own[family]:
        assert sum(map(bool, map(feature, configs))) >= 3


def test_the_mixtures_of_experts_cover_what_they_claim() -> None:
    configs = [random_config(seed) for seed in MOE_SEEDS]
    assert {c.model_type for c in configs} == {"qwen3_moe"}
    for feature in (
        lambda c: c.norm_topk_prob,
        lambda c: not c.norm_topk_prob,
        lambda c: c.num_experts_per_tok == 1,
        lambda c: 1 < c.num_experts_per_tok < c.num_experts,
        lambda c: c.num_experts_per_tok == c.num_experts,
        lambda c: c.mlp_only_layers,
        lambda c: c.decoder_sparse_step > 1,
        lambda c: not c.mlp_only_layers and c.decoder_sparse_step == 1,
        lambda c: c.tie_word_embeddings,
        lambda c: not c.tie_word_embeddings,
        lambda c: c.attention_bias,
        lambda c: c.sliding_window,
        lambda c: c.num_attention_heads == c.num_key_value_heads,
        lambda c: 1 < c.num_key_value_heads < c.num_attention_heads,
        lambda c: c.num_key_value_heads == 1 < c.num_attention_heads,
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        lambda c: c.hidden_act != "silu",
    ):
        assert sum(bool(feature(c)) for c in configs) >= 2
