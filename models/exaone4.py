"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after each sublayer, windows, full attention without RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import HEAD_DIM, WindowPolicy, Windows, dense_fields, read_layer_types
from archon.models.hf.names import DENSE_HF_MAP, POST_NORMS_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family


def _windows(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Return the windows by `layer_types`; without it, all layers but every `sliding_window_pattern`-th slide."""
    window, slides = config.get("sliding_window", 4096), read_layer_types(config, n_layers)
    if slides is None:
        period = check_kind("sliding_window_pattern", config.get("sliding_window_pattern", 4), int)
        if period < 1:
            reject_field("sliding_window_pattern", period, "expected at least 1, or layer_types")
        slides = [(layer + 1) % period != 0 for layer in range(n_layers)]
    if (any(slides) or window is not None) and check_kind("sliding_window", window, int) < 1:
        reject_field("sliding_window", window, "expected at least 1, or null with full attention in all layer_types")
    return window, tuple(window if slide else None for slide in slides)


def _rotated_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return a flag per layer: RoPE in the sliding layers, or in all layers if `sliding_window` is null."""
    window, windows = _windows(config, n_layers)
    return [window is None or layer_window is not None for layer_window in windows]


@dataclass
class Exaone4ModelArgs(BaseModelArgs):
    """Arguments of EXAONE 4, see `BaseModelArgs`."""

    qk_norm: bool = True
    norm_placement: NormPlacement = "after"

    model_types = frozenset({"exaone4"})
    hf_windows = WindowPolicy(("sliding_window", "sliding_window_pattern", "layer_types"), _windows)
    hf_ropes = RopePolicy(fields=("sliding_window",), positions=_rotated_layers)
    hf_fields = dense_fields(HEAD_DIM, num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5)


Exaone4Model = BaseArchonModel[Exaone4ModelArgs]
Exaone4StateDictAdapter, parallelize_exaone4, SPEC = define_family(
    "exaone4", Exaone4Model, DENSE_HF_MAP | QK_NORM_HF_MAP | POST_NORMS_HF_MAP
)
