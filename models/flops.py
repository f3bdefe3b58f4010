"""FLOPs of a training step in the two published conventions, and the bytes of its state.

A token costs 6·N + attention, with 6 = 2 forward + 4 backward [Kaplan et al. 2020, section 2.1]. N counts the
parameters of its matrix products: head, router, chosen and shared experts, but not the embedding lookup. Attention is
12 · heads · head_dim · seq per layer [Chowdhery et al. 2022, appendix B]: `full` ignores causality, `causal` counts
half. Recomputation is not counted.

With LoRA the base weights need no gradient: a token costs 4·N, plus 6·A for the A parameters of its LoRA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.models.args.base import BaseModelArgs

PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "4090": 165.2e12,
}
"""Dense bfloat16 peak in FLOP/s (NVIDIA's data sheets), keyed by a substring of the GPU's name."""


class Flops(NamedTuple):
    """Training FLOPs in both conventions."""

    full: float
    causal: float

    def mfu(self, seconds: float, peak: float) -> Flops:
        """Return the fraction of `peak` (FLOP/s) that this work reached in `seconds`."""
        return Flops(self.full / seconds / peak, self.causal / seconds / peak)


class StateBytes(NamedTuple):
    """Bytes of training state on one process."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


@dataclass(frozen=True)
class MatmulShape:
    """Sizes of a decoder that determine its FLOPs.

    Attributes:
        active, total: Matrix-product parameters used per token, and all; they differ by the experts not chosen.
        attention: (heads × head_dim, window in tokens) of each attention layer; the window is None for full attention.
        lora: LoRA parameters that a token uses; if positive, all other weights are frozen.
    """

    active: int
    total: int
    attention: tuple[tuple[int, int | None], ...]
    lora: int = 0

    @classmethod
    def from_args(cls, args: BaseModelArgs) -> MatmulShape:
        """Return the sizes of a model with these arguments."""
        layers = args.layer_specs
        dense = sum(layer.mixer.parameters(args.dim) for layer in layers)
        dense += args.dim * (1 if args.is_critic else args.vocab_size)
        networks = [layer.feed_forward.parameters(args.dim) for layer in layers]
        active, total = (dense + sum(counts) for counts in zip(*networks, strict=True))
        mixers = (layer.mixer for layer in layers)
        return cls(active, total, tuple((m.attention_width, m.window) for m in mixers if m.attention_width))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> MatmulShape:
        """Return the sizes of a `config.json` with Llama's field names, dense or with experts, of any model type.

        Raises:
            ConfigError: The config lacks a field or describes latent attention.
        """
        if "kv_lora_rank" in config:
            raise ConfigError(
                f"FLOPs of model_type {config.get('model_type')!r} cannot be counted: it has kv_lora_rank, but only "
                "attention with uncompressed keys and values is supported"
            )
        try:
            dim, heads, n_layers = (config[k] for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
            vocab, hidden = config["vocab_size"], config["intermediate_size"]
        except KeyError as error:
            raise ConfigError(f"config lacks {error.args[0]!r}, which the FLOP count needs") from None
        head_dim = config.get("head_dim") or dim // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention = dim * head_dim * (2 * heads + 2 * kv_heads)
        active = total = vocab * dim
        for layer in range(n_layers):
            layer_active, layer_total = _feed_forward(config, layer, dim, hidden)
            active += attention + layer_active
            total += attention + layer_total
        kinds = config.get("layer_types") or ["full_attention"] * n_layers
        windows = (config.get("sliding_window") if kind == "sliding_attention" else None for kind in kinds)
        return cls(active, total, tuple((heads * head_dim, window) for window in windows))

    def per_token(self, seq_len: int) -> Flops:
        """Return FLOPs per token in documents of `seq_len` tokens."""
        return Flops(*(flops / seq_len for flops in self.packed([seq_len])))

    def packed(self, lengths: Iterable[int]) -> Flops:
        """Return the FLOPs of training on documents of these lengths in tokens; attention grows with Σ len²."""
        full = causal = 0.0
        matmul_flops = (4 if self.lora else 6) * self.active + 6 * self.lora
        for length in lengths:
            full += matmul_flops * length
            causal += matmul_flops * length
            for (width, window), layers in Counter(self.attention).items():
                span = min(length, window or length)
                full += layers * 12 * width * length * span
                # Count pairs below the diagonal and inside the window: half of length² without a window.
                causal += layers * 12 * width * (length * span - span * span / 2)
        return Flops(full, causal)


def _feed_forward(config: Mapping[str, Any], layer: int, dim: int, hidden: int) -> tuple[int, int]:
    """Return active and total matrix parameters of a layer's feed-forward network."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    sparse = (
        experts > 0
        and layer not in (config.get("mlp_only_layers") or [])
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )
    if not sparse:
        return 3 * dim * hidden, 3 * dim * hidden
    expert = 3 * dim * (config.get("moe_intermediate_size") or hidden)
    shared_width = config.get("shared_expert_intermediate_size") or 0
    # Qwen2-MoE's shared expert also has a gate with one output.
    dense = dim * experts + 3 * dim * shared_width + (dim if shared_width else 0)
    return dense + config["num_experts_per_tok"] * expert, dense + experts * expert


def training_state_bytes(n_parameters: int, master_bytes: int = 4) -> StateBytes:
    """Return the bytes of masters, gradients and AdamW's two moments; `n_parameters` counts a tied weight once."""
    return StateBytes(n_parameters * master_bytes, n_parameters * master_bytes, 2 * n_parameters * master_bytes)
