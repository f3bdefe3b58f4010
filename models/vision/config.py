"""Strict reader of vision-encoder configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import FIXED_VALUES, MAX_LAYERS, Field, check_fields, read_field
from archon.models.vision.encoder import VisionSpec

FIELDS = {
    "depth": Field("depth", int, 27, maximum=MAX_LAYERS),
    "hidden_size": Field("dim", int, 1152),
    "intermediate_size": Field("hidden_dim", int, 4304),
    "num_heads": Field("n_heads", int, 16),
    "hidden_act": Field("hidden_act", str, "gelu_pytorch_tanh"),
    "in_channels": Field("channels", int, 3),
    "patch_size": Field("patch_size", int, 16),
    "temporal_patch_size": Field("temporal_patch_size", int, 2),
    "spatial_merge_size": Field("merge_size", int, 2),
    "out_hidden_size": Field("out_dim", int, 3584),
    "num_position_embeddings": Field("n_positions", int, 2304),
    "initializer_range": Field("initializer_range", float, 0.02),
}
DEEPSTACK = "deepstack_visual_indexes"


def read_vision_config(config: Any, deepstack: tuple[int, ...] | None) -> VisionSpec:
    """Read a `vision_config`; null means the defaults of transformers' class.

    `deepstack` is the default of `VisionSpec.deepstack`; None for families without it.
    """
    fields = FIELDS | ({} if deepstack is None else {DEEPSTACK: Field("deepstack", list, deepstack)})
    fixed_values = FIXED_VALUES | ({DEEPSTACK: []} if deepstack is None else {})
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        reject_field("vision_config", config, "expected a dictionary or null")
    check_fields(config, {*fields, "rope_parameters"}, fixed_values, "vision_config.")
    values = {field.native: read_field(config, name, field) for name, field in fields.items()}
    values["deepstack"] = tuple(values.get("deepstack", ()))
    return VisionSpec(**values, rope_theta=_read_theta(config.get("rope_parameters")))


def _read_theta(parameters: Any) -> float:
    name = "vision_config.rope_parameters"
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.keys() - {"rope_type", "rope_theta"}:
        reject_field(name, parameters, "expected a dictionary with rope_type and rope_theta, or null")
    if parameters.get("rope_type", "axial") != "axial":
        reject_field(f"{name}.rope_type", parameters["rope_type"], "expected 'axial'")
    theta = check_kind(f"{name}.rope_theta", parameters.get("rope_theta", 10_000.0), float)
    if theta <= 1:
        reject_field(f"{name}.rope_theta", theta, "expected a number above 1")
    return float(theta)
