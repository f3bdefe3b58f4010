"""Arguments for megatron-core's GPTModel so that it computes the same function as a model of archon."""

from __future__ import annotations

from typing import Any

from archon.checkpoint.megatron.sharding import MegatronLayout
from archon.models.args import BaseModelArgs
from archon.models.qwen3_moe import Qwen3MoEModelArgs
from archon.schema.errors import ConfigError


def megatron_arguments(args: BaseModelArgs, layout: MegatronLayout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (fields of TransformerConfig, arguments of GPTModel), all plain values.

    The caller adds `activation_func=F.silu` to the TransformerConfig. Raises ConfigError for a model that GPTModel
    cannot compute, or would compute differently.
    """
    for what, value, expected in (
        ("hidden_act", args.hidden_act, ("silu", "swish")),
        ("RoPE", args.rope_scaling.kind, ("default",)),
        ("the bias of o_proj", args.attention_out_bias, (False,)),
        ("a sliding window", any(window is not None for window in args.layer_windows), (False,)),
    ):
        if value not in expected:
            raise ConfigError(
                f"{what} is {value!r}; expected {' or '.join(map(repr, expected))}, the only values that archon "
                "converts to megatron-core's GPTModel"
            )
    config = {
        "num_layers": args.n_layers,
        "hidden_size": args.dim,
        "ffn_hidden_size": args.hidden_dim,
        "num_attention_heads": args.n_heads,
        "num_query_groups": args.n_kv_heads,
        "kv_channels": args.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": args.norm_eps,
        "qk_layernorm": args.qk_norm,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": args.attention_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
    }
    if isinstance(args, Qwen3MoEModelArgs) and args.sizes.experts:
        config |= {
            "num_moe_experts": args.n_experts,
            "moe_ffn_hidden_size": args.moe_hidden_dim,
            "moe_layer_freq": [int(args.is_sparse(layer)) for layer in range(args.n_layers)],
            "moe_grouped_gemm": layout.experts == "grouped",
            "moe_router_topk": args.n_experts_per_token,
            # A softmax over the chosen experts' logits equals the softmax over all experts, renormalized.
            "moe_router_pre_softmax": not args.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
        }
    model = {
        "vocab_size": layout.vocab_rows,
        "max_sequence_length": args.max_seq_len,
        "share_embeddings_and_output_weights": args.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": args.rope_theta,
    }
    return config, model
