"""Granite with sliding windows (IBM 2026): Granite with attention sinks, and a RoPE base or no RoPE per layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from archon.models.base import BaseArchonModel
from archon.models.granite import GraniteModelArgs
from archon.models.hf.checks import reject_field
from archon.models.hf.config import layer_type_windows, with_defaults
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.rope import RopeSpec
from archon.models.spec import define_family


def _rotated_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return a flag per layer: whether `layer_rope_theta` is not 0."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [True] * n_layers
    is_list = isinstance(thetas, list | tuple) and len(thetas) == n_layers
    if not is_list or any(type(theta) not in (int, float) or not (theta == 0 or theta > 1) for theta in thetas):
        reject_field("layer_rope_theta", thetas, f"expected 0 or a number above 1 for each of {n_layers} layers")
    return [theta != 0 for theta in thetas]


@dataclass
class GraniteSWAModelArgs(GraniteModelArgs):
    """Arguments of Granite with sliding windows, see `GraniteModelArgs`.

    Attributes:
        layer_thetas: RoPE base of each layer, 0 for none; empty means `rope_theta` in all layers.
    """

    attention_sinks: bool = True
    layer_thetas: tuple[float, ...] = ()

    model_types = frozenset({"granite_swa"})
    hf_windows = layer_type_windows(default=128, pattern=4, first_is_full=True)
    hf_ropes = RopePolicy(fields=("layer_rope_theta",), positions=_rotated_layers)
    hf_fields = with_defaults(
        GraniteModelArgs.hf_fields,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )

    def __post_init__(self) -> None:
        self.layer_thetas = tuple(self.layer_thetas) or (self.rope_theta,) * self.n_layers
        super().__post_init__()

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`; with the base of the layer."""
        spec = super().rope(layer)
        return None if spec is None else replace(spec, theta=self.layer_thetas[layer])

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; adds the bases, which the RoPE policy checks."""
        config, extra = super().decoder_config(config)
        thetas = config.get("layer_rope_theta")
        return config, extra | ({"layer_thetas": tuple(thetas)} if isinstance(thetas, list | tuple) else {})


_SINKS = {"model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks"}

GraniteSWAModel = BaseArchonModel[GraniteSWAModelArgs]
GraniteSWAStateDictAdapter, parallelize_granite_swa, SPEC = define_family(
    "granite_swa", GraniteSWAModel, DENSE_HF_MAP | _SINKS
)
