"""SmolLM3 (Hugging Face 2025): dense decoder with some layers without positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, WindowPolicy, Windows, dense_fields, read_switched_window
from archon.models.hf.rope import RopePolicy
from archon.models.spec import define_family


def _rotated_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return a flag per layer: 1 in `no_rope_layers`, or all but every `no_rope_layer_interval`-th layer."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = check_kind("no_rope_layer_interval", config.get("no_rope_layer_interval", 4), int)
        if interval < 1:
            reject_field("no_rope_layer_interval", interval, "expected at least 1")
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if not isinstance(flags, list | tuple) or len(flags) < n_layers or any(flag not in (0, 1) for flag in flags):
        reject_field("no_rope_layers", flags, f"expected 1 or 0 for each of num_hidden_layers = {n_layers}")
    return [bool(flag) for flag in flags[:n_layers]]


def _windows(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Return the windows by `layer_types`; without it, layers without positions slide if the switch is on."""
    return read_switched_window(config, n_layers, None, [not rotates for rotates in _rotated_layers(config, n_layers)])


@dataclass
class SmolLM3ModelArgs(BaseModelArgs):
    """Arguments of SmolLM3, see `BaseModelArgs`."""

    model_types = frozenset({"smollm3"})
    biases_all_projections = True
    hf_windows = WindowPolicy(("use_sliding_window", "sliding_window", "layer_types"), _windows)
    hf_ropes = RopePolicy(
        theta=2_000_000.0, fields=("no_rope_layers", "no_rope_layer_interval"), positions=_rotated_layers
    )
    hf_fixed_values = {"mlp_bias": False}
    hf_examples = {"no_rope_layer_interval": (2, 3)}
    hf_fields = (
        dense_fields(
            num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True, pad_token_id=128004
        )
        | HEAD_DIM
        | ATTENTION_BIAS
    )


SmolLM3Model = BaseArchonModel[SmolLM3ModelArgs]
SmolLM3StateDictAdapter, parallelize_smollm3, SPEC = define_family("smollm3", SmolLM3Model)
