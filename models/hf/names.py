"""Shared maps from Hugging Face key templates to parameter templates; families combine them."""

from __future__ import annotations

from collections.abc import Mapping

from archon.models.hf.fused_tensors import Fused

HFMap = Mapping[str, str | Fused | None]
"""Map from Hugging Face key templates to parameter templates.

The first `{}` is the layer index, a further one the row of a stacked parameter. None marks keys without a weight. The
last entry of a parameter wins, so a family overrides a shared entry by naming the parameter again.
"""


def _gated(hf: str, native: str, part: str = "weight") -> dict[str, str | Fused | None]:
    """Return the names of a gated feed-forward network."""
    projections = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return {f"model.layers.{{}}.{hf}.{a}.{part}": f"layers.{{}}.{native}.{b}.{part}" for a, b in projections.items()}


# Names of Llama-style dense decoders; entries without a weight come from old exports.
DENSE_HF_MAP: dict[str, str | Fused | None] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    **{
        f"model.layers.{{}}.self_attn.{name}_proj.{part}": f"layers.{{}}.attention.w{name}.{part}"
        for part in ("weight", "bias")
        for name in "qkvo"
    },
    **_gated("mlp", "feed_forward"),
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "score.weight": "score.weight",
    "model.rotary_emb.inv_freq": None,
    "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
}
MLP_BIAS_HF_MAP = _gated("mlp", "feed_forward", "bias")
QK_NORM_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
}
# Norms of the outputs of attention and feed-forward network, in OLMo's and Gemma's names; see `NormPlacement`.
POST_NORMS_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_post_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_post_norm.weight",
}
# Phi's and GLM-4's gate and up projections in one matrix.
FUSED_GATE_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.mlp.gate_up_proj.weight": Fused(
        ("layers.{}.feed_forward.w1.weight", "layers.{}.feed_forward.w3.weight")
    ),
}
# Hugging Face stores one matrix per expert, archon one stacked parameter; the second `{}` is the expert index.
EXPERTS_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.moe.experts.w1",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.moe.experts.w2",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.moe.experts.w3",
}
# DeepSeek-V3's experts, with a correction bias of the router and shared experts.
GROUP_ROUTED_HF_MAP: dict[str, str | Fused | None] = EXPERTS_HF_MAP | {
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.router.expert_bias",
    **_gated("mlp.shared_experts", "moe.shared_experts"),
}
# Qwen's shared expert with an output gate.
GATED_SHARED_EXPERT_HF_MAP: dict[str, str | Fused | None] = {
    **_gated("mlp.shared_expert", "moe.shared_experts"),
    "model.layers.{}.mlp.shared_expert_gate.weight": "layers.{}.moe.shared_gate.weight",
}
# The experts of Mixtral and MiniMax-M2.
BLOCK_SPARSE_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.block_sparse_moe.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.block_sparse_moe.experts.{}.w1.weight": "layers.{}.moe.experts.w1",
    "model.layers.{}.block_sparse_moe.experts.{}.w2.weight": "layers.{}.moe.experts.w2",
    "model.layers.{}.block_sparse_moe.experts.{}.w3.weight": "layers.{}.moe.experts.w3",
}


# Parts of names in the checkpoints of Granite and Hunyuan, and in transformers' in-memory models.
_IN_MEMORY = {
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.expert_bias": ".mlp.e_score_correction_bias",
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
}


def replace_prefix(hf_map: HFMap, old: str, new: str) -> dict[str, str | Fused | None]:
    """Return the map with the key prefix `old` replaced by `new`, as in composite checkpoints."""
    return {new + hf.removeprefix(old) if hf.startswith(old) else hf: entry for hf, entry in hf_map.items()}


def rename_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first prefix of `prefixes` that it has replaced."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


def transformers_map(hf_map: HFMap) -> dict[str, str | Fused | None]:
    """Convert a checkpoint map to the map of transformers' in-memory models.

    transformers 5 stacks the experts of a layer in memory (its `conversion_mapping`): gate and up as
    `experts.gate_up_proj` [E, 2F, dim], or up alone as `experts.up_proj` [E, F, dim], down as `experts.down_proj`
    [E, dim, F].
    """
    names: dict[str, str | Fused | None] = {}
    parameters = {entry for entry in hf_map.values() if isinstance(entry, str)}
    for hf, entry in hf_map.items():
        if part := next((part for part in _IN_MEMORY if part in hf), None):
            names[hf.replace(part, _IN_MEMORY[part])] = entry
            continue
        hf = hf.replace(".block_sparse_moe.", ".mlp.")
        prefix, _, row = hf.rpartition(".experts.{}.")
        stack, _, matrix = entry.rpartition(".") if isinstance(entry, str) else ("", "", "")
        if not row or matrix not in ("w1", "w2", "w3"):
            names[hf] = entry
        elif matrix == "w2":
            names[f"{prefix}.experts.down_proj"] = entry
        elif f"{stack}.w1" not in parameters:
            names[f"{prefix}.experts.up_proj"] = entry
        else:
            names[f"{prefix}.experts.gate_up_proj"] = Fused((f"{stack}.w1", f"{stack}.w3"), dim=1)
    return names
