"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, uniform_window
from archon.models.hf.names import BLOCK_SPARSE_HF_MAP, DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class MixtralModelArgs(MoEModelArgs):
    """See `MoEModelArgs`; experts are as wide as `hidden_dim`, and no projection has a bias."""

    n_experts: int = 8
    n_experts_per_token: int = 2
    norm_topk_prob: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"mixtral"})
    hf_windows: ClassVar[WindowPolicy] = uniform_window(default=None)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(theta=1_000_000.0)
    hf_aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    hf_fixed_values: ClassVar[dict[str, Any]] = {"router_jitter_noise": 0.0}
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    ) | {
        "head_dim": Field("head_dim", int, 0, null=0),
        "num_local_experts": Field("n_experts", int, 8),
        "num_experts_per_tok": Field("n_experts_per_token", int, 2),
        "router_aux_loss_coef": Field("", float, 0.001),
    }
    # The weight of a single expert, normalized, is 1 whatever the router says.
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"num_experts_per_tok": (2, 3, 4)}

    def __post_init__(self) -> None:
        self.moe_hidden_dim = self.hidden_dim
        super().__post_init__()


class MixtralModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `MixtralModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = MixtralModelArgs


class MixtralStateDictAdapter(BaseStateDictAdapter):
    """The common names of dense decoders, and those of block-sparse experts."""

    model_class = MixtralModel
    from_hf_map = DENSE_HF_MAP | BLOCK_SPARSE_HF_MAP


parallelize_mixtral = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("mixtral", MixtralStateDictAdapter, parallelize_mixtral)
