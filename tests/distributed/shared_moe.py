"""Families of the tests' own: Qwen3-MoE with shared experts, and with all that a router and experts may have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from archon.models import is_supported_model, register_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.models.layers.moe import ExpertsLayer
from archon.models.qwen3_moe import Qwen3MoEModel, Qwen3MoEModelArgs, Qwen3MoEStateDictAdapter
from archon.models.spec import MOE_TP_PLAN, family_spec, make_parallelize_fn

MODEL_TYPE = "archon_test_shared_moe"
ROUTED_TYPE = "archon_test_routed_moe"
SHARED_HIDDEN = 40


@dataclass
class SharedMoEArgs(Qwen3MoEModelArgs):
    """As Qwen3-MoE's; attention's scores have a soft cap, which no family of the zoo has."""

    shared_hidden_dim: int = SHARED_HIDDEN
    attention_soft_cap: float = 1.0

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


@dataclass
class RoutedMoEArgs(SharedMoEArgs):
    """A sigmoid router with groups and a bias, a gated shared network, biased and clamped experts."""

    model_types: ClassVar[frozenset[str]] = frozenset({ROUTED_TYPE})

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        return replace(
            super().experts(), hidden_act=ClampedSwiGLU(alpha=1.3, limit=0.2), score="sigmoid", scale=1.5, n_groups=4,
            top_groups=2, fp32_logits=True, router_bias=True, expert_biases=True, shared_gate=True,
        )  # fmt: skip


class RoutedMoEModel(SharedMoEModel):
    """See `RoutedMoEArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = RoutedMoEArgs


class RoutedMoEAdapter(SharedMoEAdapter):
    """The names of `SharedMoEAdapter`, of the biases, and of the shared network's gate."""

    model_class = RoutedMoEModel
    from_hf_map: ClassVar = (
        SharedMoEAdapter.from_hf_map
        | {
            f"model.layers.{{}}.mlp.experts.{{}}.{hf}.bias": f"layers.{{}}.moe.experts.{native}"
            for hf, native in (("gate_proj", "b1"), ("down_proj", "b2"), ("up_proj", "b3"))
        }
        | {
            "model.layers.{}.mlp.gate.bias": "layers.{}.moe.router.gate.bias",
            "model.layers.{}.mlp.shared_expert_gate.weight": "layers.{}.moe.shared_gate.weight",
        }
    )


def register() -> None:
    """Make the families known in this process."""
    for adapter in (SharedMoEAdapter, RoutedMoEAdapter):
        (name,) = adapter.model_class.args_class.model_types
        if not is_supported_model(name):
            register_model_spec(family_spec(name, adapter, make_parallelize_fn(MOE_TP_PLAN)))
