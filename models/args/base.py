"""Model arguments, read strictly from a Hugging Face config or constructed directly."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from archon.models.attention.registry import candidates
from archon.models.hf.checks import require
from archon.models.hf.config import (
    NO_WINDOWS,
    NULLABLE_HEAD_DIM,
    CompositePolicy,
    Field,
    WindowPolicy,
    as_dict,
    dense_fields,
    read_config,
)
from archon.models.hf.config_object import complete_reader
from archon.models.hf.rope import RopePolicy
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.feed_forward import DenseLayer, get_activation
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeConfig, RopeSpec, RopeUse
from archon.models.layers.spec import FeedForwardSpec, LayerSpec, MixerSpec, NormPlacement
from archon.parallel.layout import ModelSizes
from archon.schema.errors import ConfigError

# Building a model computes a frequency for each pair of features; real heads have up to 512 features.
MAX_ROTARY_DIM = 2**16
# A factor and its inverse must be representable in float32 and bfloat16.
MIN_FACTOR = 1e-30


@dataclass(frozen=True)
class ImageFormat:
    """Image format of a vision-language model.

    Attributes:
        token: Placeholder token of a merged patch.
        merge_size: The encoder merges merge_size x merge_size patches into one decoder row.
        channels, temporal_patch_size, patch_size: Sizes of a patch in channels, frames and pixels.
    """

    token: int
    merge_size: int
    channels: int
    temporal_patch_size: int
    patch_size: int

    @property
    def features(self) -> int:
        """Number of values in a patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2


@dataclass
class BaseModelArgs:
    """Sizes and options of a decoder; lengths are in tokens. The default sizes are those of Qwen2-0.5B.

    Attributes:
        dim: Width of the residual stream (`hidden_size`).
        n_kv_heads: Key and value heads, a divisor of n_heads; 0 means n_heads.
        head_dim: Features per head; 0 means dim / n_heads.
        hidden_dim: Inner width of the feed-forward network (`intermediate_size`).
        max_seq_len: `max_position_embeddings`; only some RoPE kinds use it.
        attention_bias, attention_out_bias: Biases on wq, wk, wv and on wo.
        mlp_bias: Biases in the dense feed-forward networks.
        mlp_ungated: The dense feed-forward networks have no gate.
        qk_norm: RMS norms over each head's queries and keys.
        full_width_qk_norm: The QK norms span the features of all heads.
        sliding_window: Window of sliding layers: a token attends to itself and the window - 1 tokens before it.
        layer_windows: Window of each layer, None for full attention; empty means `sliding_window` in all layers.
        pad_token_id: Embedding row without gradient from lookups, as in transformers; None for none.
        rotary_dim: Features per head that RoPE rotates; 0 means head_dim.
        rope_interleaved: RoPE rotates pairs of adjacent features.
        local_rope_theta, local_rope_scaling: `rope_theta` and `rope_scaling` of the "local" layers of `layer_ropes`.
        layer_ropes: Rotation of each layer, see `archon.models.layers.rope.RopeUse`; empty means `global` in all.
        query_beta: See `RopeSpec.query_beta`; its period is the original context of `rope_scaling`.
        norm_rounds_once: See `archon.models.layers.norm.NormSpec`.
        norm_offset: Constant added to the stored norm weights: 1 if checkpoints store weight - 1.
        norm_centered, norm_bias: See `archon.models.layers.norm.NormSpec`.
        norm_placement: See `archon.models.layers.spec.NormPlacement`.
        attention_scale: Factor on attention scores; None means head_dim^(-1/2).
        attention_soft_cap, attention_sinks, attention_gated: See `archon.models.layers.attention.AttentionLayer`.
        embedding_multiplier: Factor on token embeddings.
        embedding_multiplier_is_rounded: Round the factor to the computation's dtype before the product.
        residual_multiplier: Factor on the output of attention and feed-forward network in the residual sum.
        logits_divisor: Divisor of the logits.
        logits_soft_cap: Bound of the logits, see `archon.models.layers.head.LMHead`; None for no bound.
        initializer_range: Standard deviation of newly initialized matrices.
        balance_by_bias: Auxiliary-loss-free load balancing by a bias per expert, see `ExpertsLayer.balance`.
        is_composite: The decoder is part of a composite checkpoint, see `composite_types`.
        n_mtp_layers: Layers for multi-token prediction after the last layer, see `archon.models.mtp`. A config does not
            set it: by default these layers are passthrough tensors.
        is_critic: The model has a value head `score` instead of the language-model head.
        attn_type: Attention backend, `auto` or a registered name.
        biases_all_projections: `attention_bias` also sets `attention_out_bias`.
        composite_types: Model types of composite configs, mapped to the type of their text decoder.
        text_readers: Families that read the decoder configs of other types in a composite config.
        hf_composite: Rule that reads composite configs.
        hf_windows: Rule for sliding windows; by default there are none, and config fields of windows are rejected.
        hf_examples: Values that `archon check-model` tries for fields specific to this family.

    Raises:
        ConfigError: Values contradict each other.
    """

    dim: int = 896
    n_layers: int = 24
    n_heads: int = 14
    hidden_dim: int = 4864
    vocab_size: int = 151936
    n_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeConfig = field(default_factory=RopeConfig)
    max_seq_len: int = 32768
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    mlp_ungated: bool = False
    qk_norm: bool = False
    full_width_qk_norm: bool = False
    sliding_window: int | None = None
    layer_windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    rotary_dim: int = 0
    rope_interleaved: bool = False
    local_rope_theta: float = 10_000.0
    local_rope_scaling: RopeConfig = field(default_factory=RopeConfig)
    layer_ropes: tuple[RopeUse, ...] = ()
    query_beta: float | None = None
    norm_rounds_once: bool = False
    norm_offset: float = 0.0
    norm_centered: bool = False
    norm_bias: bool = False
    norm_placement: NormPlacement = "before"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    attention_gated: bool = False
    embedding_multiplier: float = 1.0
    embedding_multiplier_is_rounded: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    initializer_range: float = 0.02
    balance_by_bias: bool = False
    is_composite: bool = False
    n_mtp_layers: int = 0
    is_critic: bool = False
    attn_type: str = "auto"

    model_types: ClassVar[frozenset[str]] = frozenset()
    biases_all_projections: ClassVar[bool] = False
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        NULLABLE_HEAD_DIM, num_key_value_heads=0, max_position_embeddings=32768
    )
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_ropes: ClassVar[RopePolicy] = RopePolicy()
    hf_fixed_values: ClassVar[dict[str, Any]] = {}
    composite_types: ClassVar[dict[str, str]] = {}
    text_readers: ClassVar[dict[str, type[BaseModelArgs]]] = {}
    hf_composite: ClassVar[CompositePolicy] = CompositePolicy()
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "from_hf_config" in vars(cls):
            cls.from_hf_config = classmethod(complete_reader(vars(cls)["from_hf_config"].__func__))  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        for scaling in (self.rope_scaling, self.local_rope_scaling):
            is_read = isinstance(scaling, RopeConfig)
            require(is_read, f"rope_scaling is {scaling!r}; expected a RopeConfig, or leave it out: archon reads it")
        if self.biases_all_projections:
            self.attention_out_bias = self.attention_bias
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        self.head_dim = self.head_dim or self.dim // max(self.n_heads, 1)
        self.rotary_dim = self.rotary_dim or self.head_dim
        self.layer_windows = tuple(self.layer_windows) or (self.sliding_window,) * self.n_layers
        uses: tuple[RopeUse, ...] = ("global",)
        self.layer_ropes = tuple(self.layer_ropes) or uses * self.n_layers
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "max_seq_len"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; expected at least 1")
        divides = self.n_heads % self.n_kv_heads == 0
        require(divides, f"n_kv_heads is {self.n_kv_heads}; expected a divisor of n_heads {self.n_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            name = "head_dim" if self.rotary_dim == self.head_dim else "rotary_dim"
            raise ConfigError(
                f"{name} is {self.rotary_dim}; expected an even number of at most head_dim {self.head_dim}, since RoPE "
                "rotates pairs of features"
            )
        fits = self.rotary_dim <= MAX_ROTARY_DIM
        require(fits, f"head_dim or rotary_dim is {self.rotary_dim}; expected at most {MAX_ROTARY_DIM}")
        get_activation(self.hidden_act)  # raises for an unknown name, like the next line
        candidates(self.attn_type)
        for name in ("logits_divisor", "logits_soft_cap", "attention_scale", "attention_soft_cap"):
            if (value := getattr(self, name)) is not None and not MIN_FACTOR <= value <= 1 / MIN_FACTOR:
                raise ConfigError(f"{name} is {value}; expected {MIN_FACTOR:g} to {1 / MIN_FACTOR:g}")
        for name in ("layer_windows", "layer_ropes"):
            count = len(getattr(self, name))
            require(count == self.n_layers, f"{name} has {count} entries; expected one per layer, {self.n_layers}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ConfigError(f"pad_token_id is {self.pad_token_id}; expected a token below {self.vocab_size}, or null")
        for scaling in (self.rope_scaling, self.local_rope_scaling):
            scaling.check_length(self.rotary_dim)

    @property
    def norm(self) -> NormSpec:
        """Norm of the residual stream."""
        return NormSpec(self.norm_eps, self.norm_offset, self.norm_rounds_once, self.norm_centered, self.norm_bias)

    def rope(self, layer: int) -> RopeSpec | None:
        """Return the RoPE of a layer (from 0); None for a layer without positions."""
        use = self.layer_ropes[layer]
        if use == "none":
            return None
        theta, scaling = self.rope_theta, self.rope_scaling
        if use == "local":
            theta, scaling = self.local_rope_theta, self.local_rope_scaling
        period = None if self.query_beta is None else scaling.original_max_seq_len
        return RopeSpec(
            self.rotary_dim, theta, scaling, self.max_seq_len, self.rope_interleaved, self.query_beta, period
        )

    def mixer(self, layer: int) -> MixerSpec:
        """Return the token mixer of a layer (from 0)."""
        return AttentionLayer(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            rope=self.rope(layer),
            scale=self.attention_scale,
            window=self.layer_windows[layer],
            bias=self.attention_bias,
            out_bias=self.attention_out_bias,
            qk_norm=self.norm if self.qk_norm else None,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
            gated=self.attention_gated,
            full_width_qk_norm=self.full_width_qk_norm,
        )

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the feed-forward network of a layer (from 0)."""
        return DenseLayer(self.hidden_dim, self.hidden_act, self.mlp_bias, not self.mlp_ungated)

    def layer(self, layer: int) -> LayerSpec:
        """Return the spec of a layer (from 0); families override this or the methods it calls."""
        return LayerSpec(
            self.mixer(layer), self.feed_forward(layer), self.norm, self.norm_placement, self.residual_multiplier
        )

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """All layers, in order, with balancing biases if `balance_by_bias`."""
        layers = tuple(self.layer(layer) for layer in range(self.n_layers))
        if not self.balance_by_bias:
            return layers
        return tuple(replace(spec, feed_forward=spec.feed_forward.with_balancing_bias()) for spec in layers)

    def mtp_layer(self) -> LayerSpec:
        """Return the spec of the block in each MTP layer: by default the last layer's."""
        return self.layer(self.n_layers - 1)

    @property
    def mtp_specs(self) -> tuple[LayerSpec, ...]:
        """The blocks of the MTP layers, in order."""
        return (self.mtp_layer(),) * self.n_mtp_layers

    @property
    def expert_layers(self) -> dict[int, int]:
        """Map from the index of each MoE layer to its rank among the MoE layers."""
        sparse = [layer for layer, spec in enumerate(self.layer_specs) if spec.feed_forward.n_experts]
        return {layer: place for place, layer in enumerate(sparse)}

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Distinct RoPE specs of the layers."""
        mixers = (spec.mixer for spec in self.layer_specs)
        return tuple(dict.fromkeys(mixer.rope for mixer in mixers if mixer.rope is not None))

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a RoPE depends on the document length, see `RopeConfig.depends_on_length`."""
        return any(rope.scaling.depends_on_length for rope in self.ropes)

    @property
    def shares_prefixes(self) -> bool:
        """Whether documents may share the computation of a prefix; length-dependent RoPE forbids it."""
        return not self.rope_depends_on_length and all(layer.mixer.shares_prefixes for layer in self.layer_specs)

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that a parallel layout divides."""
        networks = {spec.feed_forward for spec in self.layer_specs}
        mixers = [spec.mixer for spec in self.layer_specs]
        extra_heads = {mixer.heads for mixer in mixers if mixer.module_name} - {(self.n_heads, self.n_kv_heads)}
        scans = {mixer.module_name for mixer in mixers if not mixer.gathers_keys}
        sparse = [network for network in networks if network.n_experts]
        return ModelSizes(
            self.n_heads,
            self.n_kv_heads,
            self.vocab_size,
            self.n_layers,
            tuple(sorted({width for network in networks for width in network.hidden_dims})),
            experts=max((network.n_experts for network in sparse), default=0),
            expert_hidden=max((network.hidden_dim for network in sparse), default=0),
            extra_heads=tuple(sorted(extra_heads)),
            needs_ulysses=f"a {min(scans)} layer has a state in place of keys" if scans else None,
        )

    @property
    def image_format(self) -> ImageFormat | None:
        """Image format of a vision-language model; None for a text model."""
        return None

    def image_flops(self, patches: int) -> int | None:
        """Return the FLOPs of encoding an image of `patches` patches; None for a text model."""
        return None

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """Read a transformers config object or a parsed `config.json`, with either RoPE style.

        Args:
            hf_config: Object or dictionary with a `model_type` of this family.
            is_critic: Build a value head.
            kwargs: Fields of this class that override the config, such as `attn_type`.

        Raises:
            ConfigError: A field or value is not supported; the message names both.
        """
        names = {f.name for f in fields(cls)}
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{cls.__name__} has no field {name!r}{hint}")
        config, extra = cls.decoder_config(as_dict(hf_config))
        args = read_config(config, cls.text_readers.get(str(config.get("model_type")), cls))
        if "sliding_window" in kwargs:
            # The override applies to the sliding layers of the config, or to all layers if none slides.
            windows, window = args["layer_windows"], kwargs["sliding_window"]
            args["layer_windows"] = tuple(previous and window for previous in windows) if any(windows) else ()
        return cls(**{**args, "is_critic": is_critic, **extra, **kwargs})

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the text-decoder config (nested in multimodal configs) and extra constructor arguments.

        Families with a different config layout extend this method.
        """
        model_type = config.get("model_type")
        text_type = cls.composite_types.get(model_type) if isinstance(model_type, str) else None
        if text_type is None:
            return config, {}
        config = cls.hf_composite.nested(config)
        return cls.hf_composite.text_config(config, (text_type, *cls.text_readers)), {"is_composite": True}
