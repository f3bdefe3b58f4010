"""Granite 3 MoE (IBM 2024): Granite with a mixture of experts in every layer."""

from dataclasses import dataclass

from archon.models.args.moe import LOCAL_EXPERT_FIELDS, SEVERAL_EXPERTS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.granite import GraniteModelArgs
from archon.models.hf.config import with_defaults
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.spec import define_family


@dataclass
class GraniteMoEModelArgs(MoEModelArgs):
    """Arguments of Granite 3 MoE, see `MoEModelArgs`."""

    n_experts: int = 8
    n_experts_per_token: int = 2
    norm_topk_prob: bool = True

    model_types = frozenset({"granitemoe"})
    biases_all_projections = True
    has_no_dense_layers = True
    hf_aliases = {}
    hf_fields = GraniteModelArgs.hf_fields | with_defaults(
        LOCAL_EXPERT_FIELDS, num_local_experts=8, num_experts_per_tok=2
    )
    hf_examples = GraniteModelArgs.hf_examples | SEVERAL_EXPERTS


_HF, _NATIVE = "model.layers.{}.block_sparse_moe.", "layers.{}.moe."
# One tensor per kind holds all experts of a layer: gate and up [E, 2F, dim], and down [E, dim, F].
EXPERTS_MAP: dict[str, str | Fused | None] = {
    f"{_HF}router.layer.weight": f"{_NATIVE}router.gate.weight",
    f"{_HF}input_linear.weight": Fused((f"{_NATIVE}experts.w1", f"{_NATIVE}experts.w3"), dim=1),
    f"{_HF}output_linear.weight": f"{_NATIVE}experts.w2",
}

GraniteMoEModel = BaseArchonModel[GraniteMoEModelArgs]
GraniteMoEStateDictAdapter, parallelize_granitemoe, SPEC = define_family(
    "granitemoe", GraniteMoEModel, DENSE_HF_MAP | EXPERTS_MAP
)
