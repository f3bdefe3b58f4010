"""What the gradient matrix runs: models of odd shapes, packed batches of odd lengths, and layouts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, LossFn, Metrics, loss_token_count
from archon.schema.config import EngineConfig
from archon.tools.check.layouts import LENGTHS, MAX_TOKENS, VOCAB, SequenceLoss, padded_batch
from tests.engine.tiny import full_tensor

PADDING_TOKEN = 46
"""It stands in the batches too, as a token of the text may."""
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "intermediate_size": 72,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "bias": DENSE | {"model_type": "qwen2", "num_key_value_heads": 2, "head_dim": 6},
    "window": DENSE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "few_kv": DENSE | {"num_key_value_heads": 2},
    # Biases on all four projections, and a token whose embedding has no gradient.
    "biased": DENSE | {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": PADDING_TOKEN},
    "moe": DENSE
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
# Sizes that 8-bit kernels take, also of halves.
EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
}
MODELS["fp8"] = DENSE | EVEN
# Sizes of whole blocks of NF4 on each of two ranks, and of attention on four; the scales of the feed-forward matrices
# have several scales themselves.
MODELS["blocks"] = DENSE | {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
}
MODELS["fp8_moe"] = MODELS["moe"] | EVEN | {"moe_intermediate_size": 32}
MODELS |= {f"{name}_tied": MODELS[name] | {"tie_word_embeddings": True} for name in ("fp8", "fp8_moe")}
MODELS["grown_queries"] = DENSE | {
    "model_type": "ministral3",
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    },
}
MODELS["norms_after"] = DENSE | {
    "model_type": "olmo3",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
MODELS["norms_after_few_kv"] = MODELS["norms_after"] | {"num_key_value_heads": 2}
MODELS["soft_capped"] = DENSE | {
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 40,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 3.0,
}
# A feed-forward network with squared ReLU and biases, without a gate.
MODELS["ungated"] = DENSE | {"model_type": "arcee", "hidden_act": "relu2", "mlp_bias": True, "attention_bias": True}
# Parallel blocks with one layer norm each, and full attention without positions.
MODELS["parallel"] = DENSE | {
    "model_type": "cohere2",
    "head_dim": 6,
    "rms_norm_eps": None,
    "tie_word_embeddings": True,
    "sliding_window": 6,
}
# A RoPE base per layer, and sinks.
MODELS["layer_bases"] = DENSE | {
    "model_type": "granite_swa",
    "sliding_window": 6,
    "attention_multiplier": 0.2,
    "layer_rope_theta": [1000.0, 0, 100.0, 10.0],
}
MODELS["layer_norms"] = DENSE | {"model_type": "starcoder2", "rms_norm_eps": None, "sliding_window": 6}
MODELS["multiplied"] = DENSE | {
    "model_type": "granite",
    "tie_word_embeddings": True,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
MODELS["unrotated"] = DENSE | {
    "model_type": "smollm3",
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "no_rope_layer_interval": 2,
    "use_sliding_window": True,
    "sliding_window": 6,
}
# Sinks, biases everywhere, and experts that clamp many values and whose matrices are square.
MODELS["sinks"] = DENSE | {
    "model_type": "gpt_oss",
    "sliding_window": 4,
    "intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 8,
    },
}
MODELS["tied_sinks"] = MODELS["sinks"] | {"tie_word_embeddings": True}
MODELS["partly_rotated"] = DENSE | {
    "model_type": "phi3",
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.4,
    "pad_token_id": 3,
    "sliding_window": 6,
    "original_max_position_embeddings": 8,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.5, 2.0], "long_factor": [3.0, 4.0]},
}
MODELS["tied_moe"] = MODELS["moe"] | {"tie_word_embeddings": True}
MODELS["idle_experts"] = MODELS["moe"] | {"num_experts": 64, "num_experts_per_tok": 2}
MODELS["shared"] = MODELS["moe"] | {"model_type": "archon_test_shared_moe"}
MODELS["fused"] = MODELS["moe"] | {"model_type": "archon_test_fused_moe", "attention_bias": True}
MODELS["routed"] = MODELS["moe"] | {"model_type": "archon_test_routed_moe"}
MODELS["tied_routed"] = MODELS["routed"] | {"tie_word_embeddings": True}
MODELS["glm4_moe"] = DENSE | {
    "model_type": "glm4_moe",
    "head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "attention_bias": True,
}
MODELS["minimax_m2"] = DENSE | {
    "model_type": "minimax_m2",
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 6,
}
MODELS["mixtral"] = DENSE | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
MODELS["delta"] = DENSE | {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "attention_bias": True,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 5,
    "linear_key_head_dim": 6,
    "rms_norm_eps": 1e-2,
}
MODELS["tied_delta"] = MODELS["delta"] | {"tie_word_embeddings": True}
MODELS["few_key_delta"] = MODELS["delta"] | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
MODELS["mamba"] = DENSE | {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 6,
    "mamba_proj_bias": True,
    "time_step_limit": [0.2, 2.0],
    "residual_multiplier": 0.7,
    "rms_norm_eps": 1e-2,
}
MODELS["tied_mamba"] = MODELS["mamba"] | {"tie_word_embeddings": True}
MODELS["one_group_mamba"] = MODELS["mamba"] | {"mamba_n_groups": 1}
MODELS["few_group_mamba"] = MODELS["mamba"] | {"mamba_n_groups": 2, "mamba_conv_bias": False}
MODELS["mamba_moe"] = MODELS["tied_mamba"] | {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "mamba_n_groups": 1,
    "intermediate_size": 24,
}
# Layers of one mixer or network; experts without a gate, which read a projection of the token.
MODELS["one_part"] = DENSE | {
    "model_type": "nemotron_h",
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe", "mamba"],
    "rms_norm_eps": 0.1,
    "layer_norm_epsilon": 0.1,
    "mlp_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "ssm_state_size": 6,
    "use_bias": True,
    "time_step_min": 0.2,
}
MODELS["one_part_wide"] = MODELS["one_part"] | {"moe_latent_size": None, "mlp_bias": False, "n_groups": 1}
MODELS["qwen3_next"] = MODELS["moe"] | {
    **{name: value for name, value in MODELS["delta"].items() if name.startswith(("linear", "full", "rms"))},
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 16,
}
MODELS["qwen2_moe"] = DENSE | {
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}
MODELS["latent"] = DENSE | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "head_dim": 6,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
# A softmax router that chooses the groups with the best experts.
MODELS["best_groups"] = MODELS["latent"] | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
# Values wider than queries, which have no latent.
MODELS["tied_latent"] = MODELS["latent"] | {"q_lora_rank": None, "v_head_dim": 18, "tie_word_embeddings": True}
MODELS |= {
    f"tied_{name}": MODELS[name] | {"tie_word_embeddings": True}
    for name in ("shared", "glm4_moe", "minimax_m2", "qwen2_moe", "partly_rotated")
}
# Positions of three coordinates, and a tower whose rows replace the placeholders; the second has no delta nets.
_TEXT = {name: value for name, value in MODELS["delta"].items() if name not in ("model_type", "rope_theta")}
_TEXT["rope_parameters"] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.6,
    "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}
MODELS["seeing"] = {
    "model_type": "qwen3_5",
    "text_config": _TEXT,
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 20,
        "in_channels": 1,
        "patch_size": 2,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "out_hidden_size": DENSE["hidden_size"],
        "num_position_embeddings": 9,
        "initializer_range": 0.2,
    },
    "image_token_id": VOCAB - 1,
    "tie_word_embeddings": True,
}
MODELS["seeing_attention"] = MODELS["seeing"] | {
    "text_config": _TEXT | {"layer_types": ["full_attention"] * DENSE["num_hidden_layers"]}
}
# Features of two blocks of the tower for the first layers, and layers for three further stages.
MODELS["deepstack"] = MODELS["seeing"] | {
    "model_type": "qwen3_vl",
    "text_config": {name: value for name, value in DENSE.items() if name not in ("model_type", "rope_theta")}
    | {
        "num_hidden_layers": 5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 2, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": MODELS["seeing"]["vision_config"] | {"depth": 3, "deepstack_visual_indexes": [0, 2]},
}
# An encoder whose blocks attend within windows; sections of positions one after the other.
MODELS["windowed"] = MODELS["deepstack"] | {
    "model_type": "qwen2_5_vl",
    "text_config": {name: x for name, x in MODELS["deepstack"]["text_config"].items() if name != "head_dim"}
    | {
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]},
    },
    "vision_config": {
        name: x
        for name, x in MODELS["deepstack"]["vision_config"].items()
        if name not in ("num_position_embeddings", "deepstack_visual_indexes")
    }
    | {"window_size": 4, "fullatt_block_indexes": [1]},
}
MODELS["deepstack_moe"] = MODELS["deepstack"] | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODELS["deepstack"]["text_config"]
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "mlp_only_layers": [1]},
}
# 8-bit products next to convolutions, states and gates, which are not; and next to the expansion of latents.
MODELS["fp8_delta"] = MODELS["delta"] | EVEN | {"linear_value_head_dim": 8, "linear_key_head_dim": 8}
MODELS["fp8_latent"] = MODELS["latent"] | {
    **EVEN,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "moe_intermediate_size": 32,
}
MODELS["untied_mixtral"] = MODELS["mixtral"] | {"tie_word_embeddings": False}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One layout × model: `config` holds engine options, `traps` what it guards against.

    Four options are not the engine's: `loss`, `base`, the dtype of the checkpoint, `replay`, a batch with experts, and
    `data`: `branching` documents begin alike.
    """

    layout: str
    model: str = "dense"
    dtype: str = "float64"
    critic: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    traps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        options = "-".join(f"{key}={value}" for key, value in self.config.items())
        parts = [self.model, "critic" if self.critic else "", self.layout, self.dtype, options]
        return "-".join(part for part in parts if part)

    @property
    def definition(self) -> str:
        """A hash of the model's config and of all else that the case computes."""
        computed = (MODELS[self.model], self.layout, self.dtype, self.critic, self.config, LENGTHS, MAX_TOKENS, STEPS)
        return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:12]


def branching_batch(seed: int) -> dict[str, Tensor]:
    """11 documents: turns of an agent, which branch and repeat their history, short answers to one prompt, two of them
    the same, the prompt itself, one of a single token, and one that begins like no other."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    history, first, second, prompt, answer = draw(70), draw(30), draw(22), draw(6), draw(7)
    documents = [
        history + first,
        history + draw(25),
        history + first + second,
        prompt + draw(4),
        history + first + draw(17),
        prompt + answer,
        prompt + answer,
        draw(1),
        history + first + second + draw(11),
        draw(19),
        prompt,
    ]
    data = padded_batch(tuple(map(len, documents)), VOCAB, seed)
    for row, document in zip(data["input_ids"], documents, strict=True):
        row[: len(document)] = torch.tensor(document)
    return data


class ValueLoss:
    """A critic's: squared error to a target of each token."""

    def __call__(self, values: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        return ((values - mb["target"]).square() * mb["loss_mask"]).sum(), {}


def loss_of(case: Case) -> LossFn:
    if case.config.get("loss") == "fused":
        return CrossEntropyLoss()
    return ValueLoss() if case.critic else SequenceLoss()


def write_config(folder: Path, model: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return str(folder)


def batch(lengths: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """See `padded_batch`."""
    return padded_batch(lengths, VOCAB, seed)


def engine_config(case: Case, path: str, layout: str, **changes: Any) -> EngineConfig:
    options = {key: value for key, value in case.config.items() if key not in ("loss", "base", "replay", "data")}
    return EngineConfig.model_validate(
        {
            "path": path,
            "device": "cpu",
            "dtype": case.dtype,
            "layout": layout,
            "is_critic": case.critic,
            "max_tokens_per_mb": MAX_TOKENS,
            "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1},
        }
        | options
        | changes
    )


def whole_gradients(
    engine: ArchonEngine, rows: dict[str, Tensor], loss_fn: LossFn, temperature: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The engine's gradients of every parameter, gathered as PyTorch does by itself, and its metrics."""
    found, metrics = engine.gradients(rows, loss_fn, loss_token_count, temperature, full=False)
    trained = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    missing = trained ^ found.keys()
    assert not missing, f"{sorted(missing)} have no gradient"
    return {name: full_tensor(grad) for name, grad in found.items()}, metrics
