"""A family of the tests' own: Qwen3-MoE with shared experts, which no family of the zoo has yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models import is_supported_model, register_model_spec
from archon.models.args import BaseModelArgs
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.qwen3_moe import Qwen3MoEModel, Qwen3MoEModelArgs, Qwen3MoEStateDictAdapter
from archon.models.spec import ModelSpec

MODEL_TYPE = "archon_test_shared_moe"
SHARED_HIDDEN = 40


@dataclass
class SharedMoEArgs(Qwen3MoEModelArgs):
    """As Qwen3-MoE's."""

    shared_hidden_dim: int = SHARED_HIDDEN

    model_types: ClassVar[frozenset[str]] = frozenset({MODEL_TYPE})


class SharedMoEModel(Qwen3MoEModel):
    """Every sparse layer has one shared network besides its experts."""

    args_class: ClassVar[type[BaseModelArgs]] = SharedMoEArgs


class SharedMoEAdapter(Qwen3MoEStateDictAdapter):
    """Qwen3-MoE's names and the shared network's."""

    model_class = SharedMoEModel
    from_hf_map: ClassVar = Qwen3MoEStateDictAdapter.from_hf_map | {
        f"model.layers.{{}}.mlp.shared_experts.{hf}.weight": f"layers.{{}}.moe.shared_experts.{native}.weight"
        for hf, native in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    }


def register() -> None:
    """Make the family known in this process."""
    if not is_supported_model(MODEL_TYPE):
        register_model_spec(
            ModelSpec(
                name=MODEL_TYPE,
                model_class=SharedMoEModel,
                model_args_class=SharedMoEArgs,
                state_dict_adapter_class=SharedMoEAdapter,
                parallelize_fn=make_parallelize_fn(MOE_TP_PLAN),
                supported_model_types=SharedMoEArgs.model_types,
            )
        )
