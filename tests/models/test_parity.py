"""Logits and every gradient equal transformers', over random configurations of each family (CORRECTNESS.md, Parity)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import archon.tools.check.parity
from archon.models import get_model_spec
from archon.models.spec import FAMILIES
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import build_pair, random_config
from archon.tools.check.parity import FP32_TOLERANCE, SEEDS, parity
from archon.tools.check.random_configs import random_lengths, rope_kinds
from tests.tolerances import PARITY_FP64

Feature = Callable[[Any], object]


def beyond(differences: dict[str, float], tolerance: float) -> dict[str, float]:
    return {name: difference for name, difference in differences.items() if not difference <= tolerance}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_equal_transformers(family: str, seed: int) -> None:
    assert beyond(parity(seed, family, REFERENCES.get(family)), FP32_TOLERANCE) == {}


@pytest.mark.parametrize("dtypes", [{torch.float32}, {torch.float32, torch.float64}])
def test_rounding_excuses_only_what_is_as_near_to_float64_as_transformers(
    monkeypatch: pytest.MonkeyPatch, dtypes: set[torch.dtype]
) -> None:
    def wrong_pair(*args: Any, **options: Any) -> tuple[Any, Any, Any]:
        theirs, ours, adapter = build_pair(*args, **options)
        ours.register_forward_hook(lambda _, __, out: out * (1 + 3e-5) if out.dtype in dtypes else out)
        return theirs, ours, adapter

    monkeypatch.setattr(archon.tools.check.parity, "build_pair", wrong_pair)
    differences = parity(0, "qwen3")
    assert differences.keys() == beyond(differences, 2.5e-5).keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_in_float64_too(family: str, seed: int) -> None:
    """Routing that differs for one token in a thousand would pass for rounding in float32."""
    assert beyond(parity(seed, family, dtype=torch.float64), PARITY_FP64) == {}


ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
COMMON: tuple[Feature, ...] = (
    lambda c: not c.tie_word_embeddings,
    lambda c: c.num_attention_heads == c.num_key_value_heads,
    lambda c: next(getattr(c, name) for name in ACTIVATIONS if hasattr(c, name)) != "silu",
)
TIED: tuple[Feature, ...] = (lambda c: c.tie_word_embeddings,)
# Families whose model in transformers never ties weights.
NEVER_TIED = ("nemotron_h",)
OWN_HEAD_DIM: tuple[Feature, ...] = (lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,)
# Families whose heads always have hidden_size / num_attention_heads features.
DERIVED_HEAD_DIM = ("cohere2", "olmoe", "qwen2_5_vl")
GROUPED: tuple[Feature, ...] = (
    lambda c: 1 < c.num_key_value_heads < c.num_attention_heads,
    lambda c: c.num_key_value_heads == 1 < c.num_attention_heads,
)
SWITCHED: tuple[Feature, ...] = (
    lambda c: c.use_sliding_window,
    lambda c: {"sliding_attention", "full_attention"} <= {*c.layer_types},
)
BIASES: tuple[Feature, ...] = (lambda c: c.attention_bias, lambda c: not c.attention_bias)
LATENT: tuple[Feature, ...] = (
    *BIASES,
    lambda c: c.q_lora_rank is None,
    lambda c: c.q_lora_rank is not None,
    lambda c: c.rope_interleave,
    lambda c: not c.rope_interleave,
    lambda c: c.v_head_dim < c.qk_nope_head_dim + c.qk_rope_head_dim,
    lambda c: c.v_head_dim > c.qk_nope_head_dim + c.qk_rope_head_dim,
    lambda c: c.n_group == 1,
    lambda c: c.n_group > c.topk_group,
    lambda c: c.n_shared_experts > 1,
    lambda c: c.norm_topk_prob,
    lambda c: not c.norm_topk_prob,
)
DENSE_FIRST: tuple[Feature, ...] = (lambda c: c.first_k_dense_replace == 0, lambda c: c.first_k_dense_replace == 1)
DENSE_LAYERS: tuple[Feature, ...] = (
    lambda c: c.mlp_layer_types[0] == "dense",
    lambda c: c.mlp_layer_types[-1] == "dense",
)
OWN: dict[str, tuple[Feature, ...]] = {
    "deepseek_v3": LATENT + DENSE_FIRST,
    "glm4_moe_lite": LATENT + DENSE_LAYERS,
    "kimi_k2": LATENT + DENSE_FIRST,
    "gemma3_text": (
        *BIASES,
        lambda c: c.final_logit_softcapping,
        lambda c: c.final_logit_softcapping is None,
        lambda c: len({*c.layer_types}) == 2,
    ),
    "arcee": (*BIASES, lambda c: c.hidden_act == "relu2", lambda c: c.mlp_bias, lambda c: not c.mlp_bias),
    "cohere2": (*BIASES, lambda c: len({*c.layer_types}) == 2, lambda c: len({*c.layer_types}) == 1),
    "deepseek_v2": (
        *BIASES,
        *DENSE_FIRST,
        lambda c: c.q_lora_rank is None,
        lambda c: c.n_shared_experts > 1,
        lambda c: c.topk_method == "greedy" and c.n_group > c.topk_group,
        lambda c: c.topk_method == "group_limited_greedy" and c.n_group > c.topk_group,
    ),
    "exaone4": (lambda c: len({*c.layer_types}) == 2,),
    "gemma2": (
        *BIASES,
        lambda c: c.attn_logit_softcapping,
        lambda c: c.attn_logit_softcapping is None,
        lambda c: c.final_logit_softcapping,
        lambda c: len({*c.layer_types}) == 2,
    ),
    "glm4": (*BIASES, lambda c: c.rope_parameters["partial_rotary_factor"] < 1),
    "granite": BIASES,
    "granite_swa": (
        *BIASES,
        lambda c: len({*c.layer_types}) == 2,
        lambda c: 0 in c.layer_rope_theta,
        lambda c: len({*c.layer_rope_theta} - {0}) == 2,
    ),
    "granitemoehybrid": (
        *BIASES,
        lambda c: c.num_local_experts == 0,
        lambda c: 1 < c.num_experts_per_tok < c.num_local_experts,
        lambda c: c.position_embedding_type == "rope",
        lambda c: c.position_embedding_type != "rope",
        lambda c: 1 < c.mamba_n_groups < c.mamba_n_heads,
        lambda c: c.mamba_n_groups == 1,
        lambda c: c.mamba_conv_bias,
        lambda c: not c.mamba_conv_bias,
        lambda c: c.mamba_proj_bias,
        lambda c: c.time_step_limit[0] > 0,
        lambda c: c.time_step_limit[1] == float("inf"),
    ),
    "granitemoe": (*BIASES, lambda c: 1 < c.num_experts_per_tok < c.num_local_experts),
    "nemotron_h": (
        lambda c: c.mlp_hidden_act == "relu2",
        lambda c: c.mlp_bias,
        lambda c: c.use_bias,
        lambda c: c.moe_latent_size is None,
        lambda c: c.moe_latent_size is not None,
        lambda c: c.n_group > c.topk_group,
        lambda c: c.routed_scaling_factor != 1,
        lambda c: c.layers_block_type.count("linear_attention") > 1,
        lambda c: c.layers_block_type.count("moe") > 1,
        lambda c: 1 < c.n_groups < c.mamba_num_heads,
        lambda c: c.n_groups == 1,
        lambda c: not c.use_conv_bias,
        lambda c: c.mamba_hidden_act != "silu",
        lambda c: c.time_step_min > 0.1,
    ),
    "hy_v3": (*BIASES, *DENSE_LAYERS, lambda c: c.num_shared_experts > 1),
    "olmo2": BIASES,
    "olmoe": (*BIASES, lambda c: c.norm_topk_prob, lambda c: not c.norm_topk_prob),
    "seed_oss": (*BIASES, lambda c: c.attention_out_bias, lambda c: not c.attention_out_bias),
    "starcoder2": (lambda c: c.use_bias, lambda c: not c.use_bias, lambda c: c.sliding_window is not None),
    "gpt_oss": (
        *BIASES,
        lambda c: {*c.layer_types} == {"sliding_attention", "full_attention"},
        lambda c: c.intermediate_size == c.hidden_size,
        lambda c: c.intermediate_size != c.hidden_size,
        lambda c: c.swiglu_limit == 7.0,
        lambda c: c.swiglu_limit < 7.0,
        lambda c: c.num_experts_per_tok < c.num_local_experts,
        lambda c: c.num_experts_per_tok == c.num_local_experts,
    ),
    "glm4_moe": (
        *BIASES,
        lambda c: c.use_qk_norm,
        lambda c: not c.use_qk_norm,
        lambda c: c.first_k_dense_replace,
        lambda c: not c.first_k_dense_replace,
        lambda c: 1 == c.topk_group < c.n_group,
        lambda c: 1 < c.topk_group == c.n_group,
        lambda c: c.norm_topk_prob,
        lambda c: not c.norm_topk_prob,
        lambda c: c.n_shared_experts > 1,
        lambda c: c.routed_scaling_factor != 1,
        lambda c: c.rope_parameters["partial_rotary_factor"] < 1,
    ),
    "minimax_m2": (
        lambda c: 1 < c.num_experts_per_tok < c.num_local_experts,
        lambda c: c.rope_parameters["partial_rotary_factor"] < 1,
    ),
    "mixtral": (
        lambda c: 1 < c.num_experts_per_tok < c.num_local_experts,
        lambda c: c.sliding_window is None,
        lambda c: c.sliding_window is not None,
    ),
    "qwen2_moe": (
        *SWITCHED,
        lambda c: c.qkv_bias,
        lambda c: not c.qkv_bias,
        lambda c: c.norm_topk_prob,
        lambda c: not c.norm_topk_prob,
        lambda c: c.mlp_only_layers,
        lambda c: c.decoder_sparse_step > 1,
    ),
    "llama": (*BIASES, lambda c: c.mlp_bias, lambda c: not c.mlp_bias),
    "ministral3": (lambda c: c.sliding_window is None, lambda c: c.sliding_window is not None),
    "mistral": (lambda c: c.sliding_window is None, lambda c: c.sliding_window is not None),
    "olmo3": (*BIASES, lambda c: len({*c.layer_types}) == 2),
    "phi3": (
        lambda c: c.sliding_window is None,
        lambda c: c.sliding_window is not None,
        lambda c: c.rope_parameters["partial_rotary_factor"] < 1,
    ),
    "qwen2": SWITCHED,
    "qwen3": SWITCHED + BIASES,
    "qwen3_vl": BIASES,
    "smollm3": (*SWITCHED, *BIASES, lambda c: 0 in c.no_rope_layers, lambda c: 0 not in c.no_rope_layers),
    "qwen3_moe": (
        *BIASES,
        lambda c: c.sliding_window,
        lambda c: c.norm_topk_prob,
        lambda c: not c.norm_topk_prob,
        lambda c: c.num_experts_per_tok == 1,
        lambda c: 1 < c.num_experts_per_tok < c.num_experts,
        lambda c: c.num_experts_per_tok == c.num_experts,
        lambda c: c.mlp_only_layers,
        lambda c: c.decoder_sparse_step > 1,
        lambda c: not c.mlp_only_layers and c.decoder_sparse_step == 1,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configurations_of_a_family_cover_its_features(family: str) -> None:
    wholes = [random_config(seed, family, REFERENCES.get(family)) for seed in SEEDS]
    configs = [whole.get_text_config() for whole in wholes]
    for config, whole in zip(configs, wholes, strict=True):
        config.tie_word_embeddings = whole.tie_word_embeddings
    lengths = [random_lengths(seed) for seed in SEEDS]
    kinds = Counter(c.rope_parameters["rope_type"] for c in configs if "rope_type" in c.rope_parameters)
    if kinds:
        expected = rope_kinds(get_model_spec(family).model_args_class.hf_ropes)
        assert kinds == dict.fromkeys(expected, len(SEEDS) // len(expected))
        assert sum(max(n) > c.max_position_embeddings for c, n in zip(configs, lengths, strict=True)) >= 4
    grouped = () if hasattr(configs[0], "kv_lora_rank") else GROUPED
    grouped += () if family in DERIVED_HEAD_DIM else OWN_HEAD_DIM
    grouped += () if family in NEVER_TIED else TIED
    for number, feature in enumerate(COMMON + grouped + OWN.get(family, ())):
        assert sum(bool(feature(c)) for c in configs) >= 2, f"feature {number} of {family}"
