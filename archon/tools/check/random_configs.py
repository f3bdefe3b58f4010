"""Small random configurations of any family.

Every field of `config.json` has a draw by its name: a draw below, or example values in the family's `hf_examples`.
Other booleans and floats with a default are varied; all remaining fields keep their defaults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from archon.models import get_model_spec
from archon.models.hf.config import REQUIRED, Field
from archon.models.hf.rope import GLOBAL, LOCAL, RopePolicy

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
PERIODIC_ROPE_KINDS = ("yarn", "llama3", "longrope")
"""RoPE kinds with an original context; query factors grow with its length."""
ACTIVATIONS = ("silu", "silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu")
WINDOWS = (2, 5, 11)
OMIT: Any = object()
"""Result of a draw that omits the field."""

Draw = Callable[[random.Random, dict[str, Any], frozenset[str]], Any]
"""Draw of a field from (random generator, fields drawn before, names of the family's fields)."""


def _experts_per_token(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> int:
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), 0)
    eligible = experts // config.get("n_group", 1) * config.get("topk_group", 1)
    return min(rng.choice([1, 1, 2, 3, experts]), eligible)


def _hidden_size(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> int:
    """Return a multiple of the heads (required by some config classes) of at least 24.

    Gradients of narrower models cancel: float32 and float64 of transformers then differ by 3e-5.
    """
    heads = config["num_attention_heads"]
    width = max(rng.choice([config.get("head_dim", 8), 6]), -(-24 // heads))
    return int(heads * (width + width % 2))


def _sliding_window(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> Any:
    if "use_sliding_window" in names:
        return rng.choice(WINDOWS) if config["use_sliding_window"] else OMIT
    return rng.choice(WINDOWS if "layer_types" in names else (None, *WINDOWS))


def _layer_types(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> Any:
    layers = config["num_hidden_layers"]
    if "use_sliding_window" in names:
        windowed = config["use_sliding_window"] and rng.random() < 0.5
        return ["sliding_attention"] + ["full_attention"] * (layers - 1) if windowed else OMIT
    kinds = ["sliding_attention", "full_attention"]
    return rng.sample(kinds * layers, layers)


def _mlp_layer_types(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> Any:
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(config["num_hidden_layers"])]
    return rng.choice([OMIT, kinds])


def _no_rope_layers(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> list[int] | None:
    """Return RoPE in all layers if keys have a bias: without rotation, the gradient of a key bias is 0."""
    return [1] * config["num_hidden_layers"] if config["attention_bias"] else rng.choice([None, None, [1, 0, 1]])


def _layer_thetas(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> list[float] | None:
    """Return RoPE bases, 0 for a layer without positions; none of it if keys have a bias, as in `_no_rope_layers`."""
    bases = (100.0, 10_000.0) if config["attention_bias"] else (0, 0, 100.0, 10_000.0)
    thetas = [rng.choice(bases) for _ in range(config["num_hidden_layers"])]
    return rng.choice([None, thetas, thetas, thetas])


def _hybrid_layer_types(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> list[str]:
    layers = config["num_hidden_layers"]
    kinds = ["linear_attention", "full_attention"]
    return rng.sample(kinds + rng.choices(kinds, k=layers - 2), layers)


def _single_layer_types(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> list[str]:
    layers, kinds = config.get("num_hidden_layers", 5), ["linear_attention", "full_attention", "mlp", "moe"]
    return rng.sample(kinds + rng.choices(kinds, k=layers - 4), layers)


def _optional_positions(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> str | None:
    """Return RoPE if keys have a bias: without rotation, the gradient of a key bias is 0."""
    return "rope" if config["attention_bias"] else rng.choice([None, "rope", "nope"])


def _pick(*values: Any) -> Draw:
    return lambda rng, config, names: rng.choice(values)


# In drawing order, because later draws depend on earlier ones. Sizes are small and odd.
DRAWS: dict[str, Draw] = {
    "num_hidden_layers": _pick(2, 3),
    # Not 1 with latent attention: float32 and float64 of transformers would differ by 1.5e-5.
    "num_key_value_heads": lambda rng, config, names: rng.choice([2, 3, 4] if "kv_lora_rank" in names else [1, 2, 3]),
    "num_attention_heads": lambda rng, config, names: (
        # Latent attention has equally many query and key heads.
        config.get("num_key_value_heads", 2) * (1 if "kv_lora_rank" in names else rng.choice([1, 2, 3, 4]))
    ),
    "head_dim": _pick(6, 8, 10, 16),
    "hidden_size": _hidden_size,
    "intermediate_size": _pick(32, 52),
    "vocab_size": _pick(37, 61),
    "hidden_act": _pick(*ACTIVATIONS),
    "hidden_activation": _pick(*ACTIVATIONS),
    "rms_norm_eps": _pick(1e-6, 1e-5),
    "max_position_embeddings": _pick(16, 32, 64),
    "pad_token_id": _pick(None, None, 3),
    # Large enough that attention is far from uniform, small enough that it does not saturate: at 0.2, a canceling
    # gradient makes float32 and float64 of transformers differ by 3e-5.
    "initializer_range": _pick(0.13),
    "use_sliding_window": _pick(True, False),
    "sliding_window": _sliding_window,
    "layer_types": _layer_types,
    "max_window_layers": lambda rng, config, names: (
        1 if config["use_sliding_window"] and "layer_types" not in config else OMIT
    ),
    "q_lora_rank": _pick(None, 16),
    "kv_lora_rank": _pick(8, 12),
    "qk_rope_head_dim": _pick(4, 8),
    "qk_nope_head_dim": _pick(4, 6, 8),
    "v_head_dim": _pick(4, 12, 20),
    "n_group": _pick(1, 2),
    "topk_group": lambda rng, config, names: rng.choice([1, config["n_group"]]),
    "num_experts": _pick(4, 6, 8),
    "num_local_experts": _pick(4, 6, 8),
    "n_routed_experts": _pick(4, 6, 8),
    "num_experts_per_tok": _experts_per_token,
    "moe_intermediate_size": _pick(8, 20),
    "shared_expert_intermediate_size": _pick(12, 28),
    "n_shared_experts": _pick(1, 2),
    # The normalized weight of a single expert is always 1, so the router has no gradient.
    "norm_topk_prob": lambda rng, config, names: rng.random() < 0.5 and config["num_experts_per_tok"] > 1,
    "decoder_sparse_step": _pick(1, 2),
    "mlp_only_layers": lambda rng, config, names: (
        [rng.randrange(config["num_hidden_layers"])]
        if config.get("decoder_sparse_step", 1) == 1 and rng.random() < 0.4
        else OMIT
    ),
    "first_k_dense_replace": _pick(0, 1),
    "final_logit_softcapping": _pick(None, 2.0, 20.0),
    "attn_logit_softcapping": _pick(None, 2.0, 20.0),
}
# Fields with another meaning in a family, or that transformers ignores.
FAMILY_DRAWS: dict[str, dict[str, Draw]] = {
    "gemma3": {"final_logit_softcapping": _pick(None)},
    "glm4_moe_lite": {"mlp_layer_types": _mlp_layer_types, "first_k_dense_replace": _pick(OMIT)},
    # Norms of small outputs magnify rounding: at 0.13, float32 and float64 of transformers differ by 4e-5.
    "olmo3": {"initializer_range": _pick(0.3)},
    "olmo2": {"initializer_range": _pick(0.3)},
    "kimi_k25": {"q_lora_rank": _pick(16)},  # without it, transformers 5.24 writes `self_attn.q_proj` as `self_wqkv`
    "arcee": {"hidden_act": _pick("relu2", "relu2", *ACTIVATIONS)},
    "cohere2": {
        "head_dim": _pick(OMIT),  # its config class derives it from hidden_size
        "layer_types": lambda rng, config, names: rng.choice(
            [["sliding_attention"] * config["num_hidden_layers"], _layer_types(rng, config, names)]
        ),
        # The gradient of a key bias is 0 in a layer without positions.
        "attention_bias": lambda rng, config, names: "full_attention" not in config["layer_types"],
    },
    "granite_swa": {
        "layer_rope_theta": _layer_thetas,
        # The gradient of a single sink may cancel.
        "num_attention_heads": lambda rng, config, names: max(2, DRAWS["num_attention_heads"](rng, config, names)),
    },
    "deepseek_v2": {"n_group": _pick(2)},
    "hy_v3": {"mlp_layer_types": _mlp_layer_types},
    "granitemoehybrid": {
        # The heads of all layers divide the width.
        "hidden_size": _pick(24, 48),
        "num_local_experts": _pick(0, 4, 6),
        "num_experts_per_tok": _pick(2, 3, 4),
        "layer_types": _hybrid_layer_types,
        "position_embedding_type": _optional_positions,
        "mamba_expand": _pick(1, 2),
    },
    "nemotron_h": {"num_hidden_layers": _pick(OMIT), "layers_block_type": _single_layer_types},
    "smollm3": {"no_rope_layers": _no_rope_layers},
    "gpt_oss": {
        # The gradient of a single sink may cancel.
        "num_attention_heads": lambda rng, config, names: max(2, DRAWS["num_attention_heads"](rng, config, names)),
        "intermediate_size": lambda rng, config, names: rng.choice([config["hidden_size"], 20]),
        # The weight of a single expert is always 1, so the router has no gradient.
        "num_experts_per_tok": lambda rng, config, names: max(2, _experts_per_token(rng, config, names)),
    },
    # Its config class derives the number of LongRoPE divisors from hidden_size // num_attention_heads, not head_dim.
    "phi3": {
        "num_attention_heads": lambda rng, config, names: config["num_key_value_heads"] * rng.choice([1, 2, 3]),
        "head_dim": _pick(24, 28),
        "hidden_size": lambda rng, config, names: (
            config["num_attention_heads"] * config["head_dim"]
            + rng.choice([0, (config["num_attention_heads"] - 1) // 2 * 2])
        ),
        "original_max_position_embeddings": _pick(8, 16),
        "initializer_range": _pick(0.08),  # wider than other families
    },
    # Gradients of keys cancel without a window: at 0.13, float32 and float64 differ by 1.5e-5.
    "qwen3_vl_text": {"initializer_range": _pick(0.2)},
    "qwen3_vl_moe_text": {
        "initializer_range": _pick(0.2),
        # No square expert matrices, see `Qwen3VLMoeTextModelArgs`.
        "moe_intermediate_size": lambda rng, config, names: rng.choice([8, 20 if config["hidden_size"] != 40 else 28]),
    },
    "qwen3_moe": {"layer_types": _pick(OMIT), "max_window_layers": _pick(OMIT)},
    "qwen3_5_moe_text": {"intermediate_size": _pick(OMIT)},  # not declared by the config class
}
# Types whose `mrope_section` must sum to the frequencies of a head.
CONSECUTIVE_SECTIONS = frozenset({"qwen2_5_vl"})
# Smallest possible vision encoder of a composite model; its tensors pass through.
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
}
_POSITIONS = {"num_position_embeddings": 4}
FAMILY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 8, "fullatt_block_indexes": [0]},
    "qwen3_vl": _POSITIONS | {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _POSITIONS | {"deepstack_visual_indexes": [0]},
}
# Encoders of other configs, which archon does not compute.
PASSTHROUGH_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "patch_size": 2,
        "image_size": 4,
    },
    "kimi_k25": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "patch_size": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
    },
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "patch_size": 2,
        "image_size": 4,
    },
}


def vision_config(model_type: str, hidden_size: int) -> dict[str, Any]:
    """Return the smallest vision encoder of a composite model with a decoder of `hidden_size` features."""
    if model_type in PASSTHROUGH_VISION:
        return PASSTHROUGH_VISION[model_type]
    return VISION | FAMILY_VISION.get(model_type, _POSITIONS) | {"out_hidden_size": hidden_size}


def random_rope(rng: random.Random, kind: str, rotary_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of one kind; optional fields are present at random."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([10.0, 1_000.0, 1_000_000.0])}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = rng.choice([1.5, 2.0, 4.0, 8.0])
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = rng.choice([8, 16])
    if kind == "yarn":
        rope |= rng.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}])
        rope |= rng.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        rope["short_factor"] = [1 + rng.random() for _ in range(rotary_dim // 2)]
        rope["long_factor"] = [1 + 5 * rng.random() for _ in range(rotary_dim // 2)]
        rope |= rng.choice([{}, {"factor": 4.0}, {"attention_factor": 1.2}])
    return rope


def rope_kinds(policy: RopePolicy) -> tuple[str, ...]:
    """Return the kinds of RoPE that a family's configurations cycle through."""
    if policy.kinds is not None:
        return policy.kinds
    return PERIODIC_ROPE_KINDS if policy.query_beta_field is not None else ROPE_KINDS


def _rope_draw(seed: int, kind: str | None, policy: RopePolicy) -> Draw:
    def draw(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        kinds = rope_kinds(policy)
        chosen = kinds[seed % len(kinds)] if kind is None else kind if kind in kinds else kinds[0]
        head_dim = config.get("qk_rope_head_dim") or config.get("head_dim")
        head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
        share = config.get("partial_rotary_factor")
        rotary_dim = int(head_dim * (share or 1))
        if policy.partial is not None and share is None:
            rotary_dim = rng.choice(range(4, head_dim + 1, 2))  # dynamic RoPE divides by rotary_dim - 2
        rope = random_rope(rng, chosen, rotary_dim)
        if chosen == "yarn" and "kv_lora_rank" in names:  # these fields change the attention scale
            rope |= rng.choice([{"mscale": 0.7, "mscale_all_dim": 1.1}, {"mscale_all_dim": 0.6}])
        if policy.partial is not None and share is None:
            rope["partial_rotary_factor"] = rotary_dim / head_dim
        if policy.query_beta_field is not None:
            rope[policy.query_beta_field] = rng.choice([0.1, 0.5])
        if policy.local_theta is None:
            return rope
        rope.pop("truncate", None)  # ignored by transformers here
        return {GLOBAL: rope, LOCAL: random_rope(rng, rng.choice(("default", "default", "linear")), head_dim)}

    return draw


def _vary(field: Field) -> Draw:
    """Return the draw of a field by its type."""

    def draw(rng: random.Random, config: dict[str, Any], names: frozenset[str]) -> Any:
        if field.kind is bool:
            return rng.random() < 0.5
        if field.kind is float and field.native and field.default is not REQUIRED and field.default:
            return field.default * rng.choice([0.5, 1.0, 1.5])
        return OMIT

    return draw


def draw_fields(seed: int, model_type: str, *, rope_kind: str | None = None, **fixed: Any) -> dict[str, Any]:
    """Return the fields of a random configuration of a family, without `model_type`.

    A composite model has the fields of the text decoder in `text_config`. Every field has a separate random stream, so
    a new field changes no other.

    Args:
        seed: random seed; successive seeds cycle through the kinds of RoPE.
        model_type: type of the family.
        rope_kind: fixed kind of RoPE; a family without it uses its first kind.
        **fixed: values of fields that are not drawn.
    """
    args = get_model_spec(model_type, text_only=True).model_args_class
    text_type = args.composite_types.get(model_type, model_type)
    names = frozenset({*args.hf_fields, *args.hf_windows.fields, "rope_parameters"})
    draws: dict[str, Draw] = {name: draw for name, draw in DRAWS.items() if name in names}
    draws |= {name: _vary(field) for name, field in args.hf_fields.items() if name not in draws}
    draws |= {"rope_parameters": _rope_draw(seed, rope_kind, args.hf_ropes)}
    draws |= {name: _pick(*values) for name, values in args.hf_examples.items()}
    draws |= FAMILY_DRAWS.get(text_type, {}) | FAMILY_DRAWS.get(model_type, {})
    config = dict(fixed)
    for name, draw in draws.items():
        if name not in config:
            value = draw(random.Random(f"{seed} {name}"), config, names)
            if value is not OMIT:
                config[name] = value
    if model_type in CONSECUTIVE_SECTIONS:
        pairs = config["hidden_size"] // config["num_attention_heads"] // 2
        row = random.Random(f"{seed} mrope_section").randint(1, (pairs - 1) // 2)
        config["rope_parameters"]["mrope_section"] = [pairs - 2 * row, row, row]
    if text_type == model_type:
        return config
    vision = vision_config(model_type, config["hidden_size"])
    tied = config.pop("tie_word_embeddings", False)
    text = config | {"model_type": text_type}
    return {"tie_word_embeddings": tied, "text_config": text, "vision_config": vision}


def random_lengths(seed: int) -> list[int]:
    """Return odd document lengths: 1, two equal ones, and one beyond some of the drawn context lengths.

    Every fourth pack has a document long enough for blockwise attention without a window.
    """
    rng = random.Random(1000 + seed)
    lengths = [2 * rng.randrange(0, 23) + 1 for _ in range(3)] + [1, 7, 7, 47 if seed % 4 else 141]
    rng.shuffle(lengths)
    return lengths
