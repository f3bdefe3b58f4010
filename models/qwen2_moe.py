"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts and a gated shared expert."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archon.models.args.moe import STEPPED_EXPERT_FIELDS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.checks import check_kind
from archon.models.hf.config import (
    NULLABLE_HEAD_DIM,
    SWITCHED_WINDOW,
    Field,
    WindowPolicy,
    Windows,
    dense_fields,
    read_switched_window,
    with_defaults,
)
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, GATED_SHARED_EXPERT_HF_MAP
from archon.models.spec import define_family


def _read_windows(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Return the windows; without `layer_types` every other layer below `max_window_layers` slides."""
    end = check_kind("max_window_layers", config.get("max_window_layers", 28), int)
    return read_switched_window(config, n_layers, 4096, [layer < end and layer % 2 == 0 for layer in range(n_layers)])


@dataclass
class Qwen2MoEModelArgs(MoEModelArgs):
    """Arguments of Qwen2-MoE, see `MoEModelArgs`."""

    n_experts: int = 60
    n_experts_per_token: int = 4
    moe_hidden_dim: int = 1408
    shared_hidden_dim: int = 5632
    attention_bias: bool = True

    model_types = frozenset({"qwen2_moe"})
    shared_gate = True
    hf_windows = WindowPolicy(SWITCHED_WINDOW.fields, _read_windows)
    hf_aliases = {}
    hf_fields = (
        dense_fields(NULLABLE_HEAD_DIM, num_key_value_heads=16, max_position_embeddings=32768)
        | {
            "qkv_bias": Field("attention_bias", bool, True),
            "shared_expert_intermediate_size": Field("shared_hidden_dim", int, 5632),
        }
        | with_defaults(STEPPED_EXPERT_FIELDS, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    )


Qwen2MoEModel = BaseArchonModel[Qwen2MoEModelArgs]
Qwen2MoEStateDictAdapter, parallelize_qwen2_moe, SPEC = define_family(
    "qwen2_moe", Qwen2MoEModel, DENSE_HF_MAP | EXPERTS_HF_MAP | GATED_SHARED_EXPERT_HF_MAP
)
