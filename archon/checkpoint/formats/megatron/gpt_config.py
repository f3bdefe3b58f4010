"""Arguments for a megatron-core GPTModel that computes the same function as an archon model."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, NoReturn

from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.models.args.base import BaseModelArgs
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.rope import RopeSpec
from archon.models.layers.spec import FeedForwardSpec, LayerSpec
from archon.schema.errors import ConfigError

# Fields that the layer specs or the converted config express, or that change no output. All other fields must have
# their default values.
_EXPORTED_FIELDS = frozenset(
    """
    dim n_layers n_heads hidden_dim vocab_size n_kv_heads head_dim norm_eps rope_theta rope_scaling max_seq_len
    hidden_act attention_bias attention_out_bias qk_norm sliding_window layer_windows tie_word_embeddings pad_token_id
    rotary_dim rope_interleaved norm_offset norm_placement attention_scale residual_multiplier initializer_range
    balance_by_bias is_critic attn_type full_width_qk_norm local_rope_theta local_rope_scaling layer_ropes query_beta
    norm_rounds_once
    """.split()  # noqa: SIM905 - a table is easier to read than quoted names
)


def megatron_arguments(args: BaseModelArgs, layout: MegatronLayout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (TransformerConfig fields, GPTModel arguments), all plain values.

    The caller adds `activation_func=F.silu` to the TransformerConfig. The layer specs are checked, not the family.

    Raises:
        ConfigError: GPTModel cannot compute the model or would compute it differently.
    """
    for field in fields(BaseModelArgs):
        if field.name not in _EXPORTED_FIELDS:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            _require(field.name, getattr(args, field.name), default)
    layers = args.layer_specs
    for layer in dict.fromkeys(layers):
        _check_layer(layer, args)
    dense, sparse = (
        {layer.feed_forward for layer in layers if bool(layer.feed_forward.n_experts) == has_experts}
        for has_experts in (False, True)
    )
    for networks in (dense, sparse):
        if len(networks) > 1:
            raise ConfigError(
                f"layers have different feed-forward networks, {' and '.join(map(str, networks))}; megatron-core's "
                "GPTModel has one for all dense layers and one for all with experts"
            )
    config = {
        "num_layers": args.n_layers,
        "hidden_size": args.dim,
        "ffn_hidden_size": max((network.hidden_dims[0] for network in dense), default=args.hidden_dim),
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
    for experts in sparse:
        assert isinstance(experts, ExpertsLayer)
        config |= {
            "num_moe_experts": experts.n_experts,
            "moe_ffn_hidden_size": experts.hidden_dim,
            "moe_layer_freq": [int(layer.feed_forward.n_experts > 0) for layer in layers],
            "moe_grouped_gemm": layout.experts == "grouped",
            "moe_router_topk": experts.top_k,
            # A softmax over the chosen experts' logits equals the softmax over all experts, renormalized.
            "moe_router_pre_softmax": not experts.normalize,
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


def _check_layer(layer: LayerSpec, args: BaseModelArgs) -> None:
    """Raise ConfigError for a feature of a layer that GPTModel's layers lack."""
    mixer = layer.mixer
    if type(mixer) is not AttentionLayer:
        _refuse("the mixer", type(mixer).__name__, AttentionLayer.__name__)
    rope = RopeSpec(args.head_dim, args.rope_theta, max_seq_len=args.max_seq_len)
    _require("RoPE", None if mixer.rope is None else mixer.rope.scaling.kind, rope.scaling.kind)
    _require_fields(mixer.rope, rope)
    _require("the bias of o_proj", mixer.out_bias, False)
    qk_norm = args.norm if args.qk_norm else None
    _require_fields(
        mixer,
        AttentionLayer(
            args.n_heads, args.n_kv_heads, args.head_dim, rope=rope, bias=args.attention_bias, qk_norm=qk_norm
        ),
    )
    network = layer.feed_forward
    expected: FeedForwardSpec
    if type(network) is DenseLayer:
        expected = DenseLayer(network.hidden_dim, _expected_activation(network.hidden_act))
    elif type(network) is ExpertsLayer:
        experts = network.n_experts, network.top_k, network.hidden_dim
        expected = ExpertsLayer(*experts, _expected_activation(network.hidden_act), normalize=network.normalize)
    else:
        _refuse("the feed-forward network", type(network).__name__, f"{DenseLayer.__name__} or {ExpertsLayer.__name__}")
    _require_fields(network, expected)
    _require_fields(layer.norm, type(layer.norm)(args.norm_eps))
    _require_fields(layer, LayerSpec(mixer, network, layer.norm))


def _expected_activation(act: Any) -> str:
    """Return `act` if it is a name of silu, else `silu`."""
    return act if act in ("silu", "swish") else "silu"


def _require_fields(spec: Any, expected: Any) -> None:
    for field in fields(expected):
        _require(field.name, getattr(spec, field.name), getattr(expected, field.name))


def _require(name: str, value: object, expected: object) -> None:
    if value != expected:
        _refuse(name, value, expected)


def _refuse(name: str, value: object, expected: object) -> NoReturn:
    raise ConfigError(
        f"{name} is {value!r}; expected {expected!r}, the only value that archon converts to megatron-core's GPTModel"
    )
