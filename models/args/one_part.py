"""Arguments and checkpoint names of decoders whose layers are a mixer or a network alone, as in Nemotron-H."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from archon.models.args.mamba import ATTENTION, MAMBA, MAMBA_EXAMPLES, MambaModelArgs, mamba_map, read_step_limits
from archon.models.args.moe import GroupRoutedArgs
from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import MAX_LAYERS, Field
from archon.models.hf.names import HFMap
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.spec import FeedForwardSpec, MixerSpec, NoFeedForward, NoMixer, NormPlacement

MLP, MOE = "mlp", "moe"
"""Kinds of layers without a mixer."""
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
_KINDS = {"mamba": MAMBA, "attention": ATTENTION} | {kind: kind for kind in _LETTERS.values()}


@dataclass
class OnePartModelArgs(MambaModelArgs, GroupRoutedArgs):
    """Arguments of a decoder whose layers are Mamba-2, attention, a network or experts alone.

    `time_step_min` bounds the step sizes of Mamba-2, as in transformers, and also while decoding, where transformers
    has no bound.

    Attributes:
        moe_latent_dim: See `ExpertsLayer.latent_dim`.
    """

    mlp_ungated: bool = True
    norm_rounds_once: bool = True
    norm_placement: NormPlacement = "parallel"
    mamba_dt_limits: tuple[float, float] = (0.001, float("inf"))
    moe_latent_dim: int = 0

    layer_kinds: ClassVar[tuple[str, ...]] = (MAMBA, ATTENTION, MLP, MOE)

    def __post_init__(self) -> None:
        shared_hidden_dim = self.shared_hidden_dim
        super().__post_init__()
        self.shared_hidden_dim = shared_hidden_dim  # a field of the config, not a multiple of the experts' width

    def is_sparse(self, layer: int) -> bool:
        """See `MoEModelArgs.is_sparse`."""
        return self.layer_types[layer] == MOE

    def mixer(self, layer: int) -> MixerSpec:
        """See `BaseModelArgs.mixer`."""
        return NoMixer() if self.layer_types[layer] in (MLP, MOE) else super().mixer(layer)

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """See `BaseModelArgs.feed_forward`."""
        return super().feed_forward(layer) if self.layer_types[layer] in (MLP, MOE) else NoFeedForward()

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        return replace(super().experts(), is_gated=False, latent_dim=self.moe_latent_dim, shared_bias=self.mlp_bias)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; a letter of `hybrid_override_pattern`, or a name, is a kind of layer."""
        config, extra = super().decoder_config(config)
        kinds = _read_kinds(config.pop("hybrid_override_pattern", None), config.pop("layers_block_type", None))
        layers = config.setdefault("num_hidden_layers", len(kinds))
        if layers != len(kinds):
            reject_field("num_hidden_layers", layers, f"expected {len(kinds)}, the number of kinds of layers")
        eps = config.get("layer_norm_epsilon", 1e-5)
        for name in ("norm_eps", "rms_norm_eps"):
            if (other := config.pop(name, None)) not in (None, eps):
                reject_field(name, other, f"expected layer_norm_epsilon {eps}, which the model uses")
        limits = config.pop("time_step_limit", None)
        if limits is not None and read_step_limits(limits) != (0, float("inf")):
            reject_field("time_step_limit", limits, "expected no limits: transformers' model ignores it")
        for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
            config.pop(name, None)  # the layers for multi-token prediction pass through
        low = check_kind("time_step_min", config.pop("time_step_min", 0.001), float)
        return config, extra | {"layer_types": kinds, "mamba_dt_limits": (low, float("inf"))}


def _read_kinds(pattern: Any, names: Any) -> tuple[str, ...]:
    """Return the kind of each layer from a pattern of letters, a list of names, or both."""
    letters = " or ".join(f"{letter} ({kind})" for letter, kind in _LETTERS.items())
    if pattern is not None and (not isinstance(pattern, str) or not pattern or {*pattern} - {*_LETTERS}):
        reject_field("hybrid_override_pattern", pattern, f"expected {letters} for each layer")
    from_pattern = None if pattern is None else tuple(_LETTERS[letter] for letter in pattern)
    if names is None:
        return from_pattern or (MAMBA, MOE, ATTENTION, MLP)
    if not isinstance(names, list | tuple) or not names or not all(name in [*_KINDS] for name in names):
        reject_field("layers_block_type", names, f"expected {' or '.join(_KINDS)} for each layer")
    kinds = tuple(_KINDS[name] for name in names)
    if from_pattern not in (None, kinds):
        reject_field("hybrid_override_pattern", pattern, "it contradicts layers_block_type; keep one")
    return kinds


# Config fields next to those of `dense_fields`; the last ones change speed, cache, initialization, or nothing.
ONE_PART_FIELDS = {
    "mlp_hidden_act": Field("hidden_act", str, "relu2"),
    "layer_norm_epsilon": Field("norm_eps", float, 1e-5),
    "moe_shared_expert_intermediate_size": Field("shared_hidden_dim", int, 7688),
    "moe_latent_size": Field("moe_latent_dim", int, 0, null=0),
    "mamba_num_heads": Field("mamba_heads", int, 128),
    "mamba_head_dim": Field("mamba_head_dim", int, 64),
    "mamba_hidden_act": Field("mamba_hidden_act", str, "silu"),
    "n_groups": Field("mamba_groups", int, 8),
    "ssm_state_size": Field("mamba_state_dim", int, 128),
    "conv_kernel": Field("mamba_kernel_size", int, 4),
    "use_conv_bias": Field("mamba_conv_bias", bool, True),
    "use_bias": Field("mamba_bias", bool, False),
    "num_nextn_predict_layers": Field("", int, 0, minimum=0, maximum=MAX_LAYERS),
    "pad_token_id": Field("", int, 0, null=None, minimum=0),
    "num_logits_to_keep": Field("", int, 1, null=None),
    "expand": Field("", int, 2),
    "chunk_size": Field("", int, 128),
    "use_mamba_kernels": Field("", bool, True),
    "mamba_ssm_cache_dtype": Field("", str, "float32"),
    "moe_shared_expert_overlap": Field("", bool, True),
    "rescale_prenorm_residual": Field("", bool, True),
    "time_step_max": Field("", float, 0.1),
    "time_step_floor": Field("", float, 1e-4),
}
ONE_PART_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2", "relu2", "silu", "gelu"),
    "layer_norm_epsilon": MAMBA_EXAMPLES["rms_norm_eps"],
    "moe_shared_expert_intermediate_size": (12, 28),
    "moe_latent_size": (None, 12, 20),
    "mamba_num_heads": (4, 8),
    "mamba_head_dim": (4, 6, 10),
    "mamba_hidden_act": ("silu", "silu", "gelu"),
    "n_groups": (1, 2, 4),
    "ssm_state_size": (8, 12, 16),
    "conv_kernel": (2, 3, 4),
    "chunk_size": (8, 128),
    "time_step_min": (1e-9, 0.001, 0.5),
}
_PARTS = ("weight", "bias")
_HF, _NATIVE = "backbone.layers.{}.mixer.", "layers.{}."
_NETWORKS: dict[str, str] = {
    f"{_HF}{prefix}{hf}_proj.{part}": f"{_NATIVE}{module}.{native}.{part}"
    for prefix, module in (("", "feed_forward"), ("shared_experts.", "moe.shared_experts"))
    for hf, native in (("up", "w3"), ("down", "w2"))
    for part in _PARTS
} | {
    f"{_HF}fc{number}_latent_proj.{part}": f"{_NATIVE}moe.latent_{native}.{part}"
    for number, native in ((1, "in"), (2, "out"))
    for part in _PARTS
}
ONE_PART_HF_MAP: HFMap = {
    "backbone.embeddings.weight": "tok_embeddings.weight",
    "backbone.layers.{}.norm.weight": f"{_NATIVE}attention_norm.weight",
    **mamba_map(_HF),
    **{f"{_HF}{name}_proj.weight": f"{_NATIVE}attention.w{name}.weight" for name in "qkvo"},
    **_NETWORKS,
    f"{_HF}gate.weight": f"{_NATIVE}moe.router.gate.weight",
    f"{_HF}gate.e_score_correction_bias": f"{_NATIVE}moe.router.expert_bias",
    f"{_HF}experts.{{}}.up_proj.weight": f"{_NATIVE}moe.experts.w3",
    f"{_HF}experts.{{}}.down_proj.weight": f"{_NATIVE}moe.experts.w2",
    "backbone.norm_f.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "score.weight": "score.weight",
}
