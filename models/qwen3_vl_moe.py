"""Qwen3-VL-MoE (Qwen 2025, arXiv:2511.21631): Qwen3-VL with a mixture of experts in most layers."""

from dataclasses import dataclass

from archon.models.args.moe import SEVERAL_EXPERTS, STEPPED_EXPERT_FIELDS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.checks import require
from archon.models.hf.composite import CompositeStateDictAdapter
from archon.models.hf.config import ATTENTION_BIAS, NULLABLE_HEAD_DIM, dense_fields, with_defaults
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP, HFMap
from archon.models.qwen3_vl import Qwen3VLModelArgs, Qwen3VLTextModelArgs
from archon.models.spec import define_family
from archon.models.vision.language_model import VisionLanguageModel, VisionLanguageStateDictAdapter

_EXPERTS = "layers.{}.moe.experts."
# [E, in, out], as released; see `CompositeStateDictAdapter.stacked`.
_HF_MAP: HFMap = {
    **DENSE_HF_MAP,
    **QK_NORM_HF_MAP,
    **{hf: entry for hf, entry in EXPERTS_HF_MAP.items() if ".experts." not in hf},
    "model.layers.{}.mlp.experts.gate_up_proj": Fused((f"{_EXPERTS}w1", f"{_EXPERTS}w3"), dim=1, transposed=True),
    "model.layers.{}.mlp.experts.down_proj": Fused((f"{_EXPERTS}w2",), transposed=True),
}
_EXPERT_FIELDS = {name: field for name, field in STEPPED_EXPERT_FIELDS.items() if name != "norm_topk_prob"}


@dataclass
class Qwen3VLMoeTextModelArgs(Qwen3VLTextModelArgs, MoEModelArgs):
    """Arguments of Qwen3-VL-MoE's text decoder, see `Qwen3VLTextModelArgs` and `MoEModelArgs`."""

    n_experts: int = 60
    n_experts_per_token: int = 4
    moe_hidden_dim: int = 1408
    norm_topk_prob: bool = True

    composite_types = {"qwen3_vl_moe": "qwen3_vl_moe_text"}
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=16, max_position_embeddings=128_000
    ) | with_defaults(_EXPERT_FIELDS, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    hf_fixed_values = {"norm_topk_prob": True}
    hf_examples = SEVERAL_EXPERTS

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"moe_intermediate_size is {self.moe_hidden_dim} with hidden_size {self.dim}"
        is_square = self.dim in (self.moe_hidden_dim, 2 * self.moe_hidden_dim)
        require(not is_square, f"{problem}; expected expert matrices whose shape reveals if a file transposes them")


@dataclass
class Qwen3VLMoeModelArgs(Qwen3VLMoeTextModelArgs, Qwen3VLModelArgs):
    """Arguments of Qwen3-VL-MoE, see `Qwen3VLMoeTextModelArgs` and `Qwen3VLModelArgs`."""

    model_types = frozenset({"qwen3_vl_moe"})


Qwen3VLMoeTextModel = BaseArchonModel[Qwen3VLMoeTextModelArgs]
Qwen3VLMoeTextStateDictAdapter, _, TEXT = define_family(
    "qwen3_vl_moe_text", Qwen3VLMoeTextModel, _HF_MAP, adapter=CompositeStateDictAdapter
)
Qwen3VLMoeModel = VisionLanguageModel[Qwen3VLMoeModelArgs]
Qwen3VLMoeStateDictAdapter, parallelize_qwen3_vl_moe, SPEC = define_family(
    "qwen3_vl_moe", Qwen3VLMoeModel, _HF_MAP, adapter=VisionLanguageStateDictAdapter, text=TEXT
)
