"""An invented family with experts in one file outside the product, with argument and checkpoint names of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models import BaseArchonModel, BaseModelArgs, BaseStateDictAdapter, is_supported_model, register_model_spec
from archon.models.hf.config import NO_WINDOWS, Field, WindowPolicy, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.spec import FeedForwardSpec
from archon.models.spec import MOE_TP_PLAN, family_spec, make_parallelize_fn

MODEL_TYPE = "archon_test_outside_moe"


@dataclass
class OutsideArgs(BaseModelArgs):
    """It shares no class with the product's families that have experts."""

    specialists: int = 8
    consulted: int = 2
    specialist_width: int = 16
    committees: int = 1
    steady: bool = True
    qk_norm: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({MODEL_TYPE})
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=2, max_position_embeddings=4096) | {
        "head_dim": Field("head_dim", int, 0, null=0),
        "specialists": Field("specialists", int, 8),
        "consulted": Field("consulted", int, 2),
        "specialist_width": Field("specialist_width", int, 16),
        "committees": Field("committees", int, 1),
        "steady": Field("steady", bool, True),
    }

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """See `BaseModelArgs.feed_forward`; the first layer is dense."""
        if layer == 0:
            return super().feed_forward(layer)
        sizes: dict[str, Any] = {"n_groups": self.committees, "top_groups": self.committees}
        return ExpertsLayer(self.specialists, self.consulted, self.specialist_width, normalize=self.steady, **sizes)


class OutsideModel(BaseArchonModel):
    """See `OutsideArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = OutsideArgs


class OutsideAdapter(BaseStateDictAdapter):
    """Names of its own for experts and norms."""

    model_class = OutsideModel
    from_hf_map: ClassVar = {
        hf.replace("input_layernorm", "first_norm"): native for hf, native in (DENSE_HF_MAP | QK_NORM_HF_MAP).items()
    } | {
        "model.layers.{}.panel.chair.weight": "layers.{}.moe.router.gate.weight",
        "model.layers.{}.panel.{}.open.weight": "layers.{}.moe.experts.w1",
        "model.layers.{}.panel.{}.close.weight": "layers.{}.moe.experts.w2",
        "model.layers.{}.panel.{}.lift.weight": "layers.{}.moe.experts.w3",
    }


def register() -> None:
    """Make the family known in this process."""
    if not is_supported_model(MODEL_TYPE):
        register_model_spec(family_spec(MODEL_TYPE, OutsideAdapter, make_parallelize_fn(MOE_TP_PLAN)))
