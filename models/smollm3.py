"""SmolLM3 (Hugging Face 2025): the shared decoder, some of whose layers have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import Field, WindowPolicy, Windows, dense_fields, read_switched_window
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


def _rotated_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Returns which layers have positions: 1 in `no_rope_layers`, else all but each `no_rope_layer_interval`-th."""
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
    """Returns the windows: by `layer_types`, else of the layers without positions, if `use_sliding_window`."""
    return read_switched_window(config, n_layers, None, [not rotates for rotates in _rotated_layers(config, n_layers)])


@dataclass
class SmolLM3ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections."""

    model_types: ClassVar[frozenset[str]] = frozenset({"smollm3"})
    hf_windows: ClassVar[WindowPolicy] = WindowPolicy(("use_sliding_window", "sliding_window", "layer_types"), _windows)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(
        theta=2_000_000.0, fields=("no_rope_layers", "no_rope_layer_interval"), positions=_rotated_layers
    )
    hf_fixed_values: ClassVar[dict[str, Any]] = {"mlp_bias": False}
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"no_rope_layer_interval": (2, 3)}
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True, pad_token_id=128004
    ) | {
        # transformers' SmolLM3 uses `head_dim`, which its config class does not declare.
        "head_dim": Field("head_dim", int, 0),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()


class SmolLM3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `SmolLM3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = SmolLM3ModelArgs


class SmolLM3StateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders."""

    model_class = SmolLM3Model


parallelize_smollm3 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("smollm3", SmolLM3StateDictAdapter, parallelize_smollm3)
