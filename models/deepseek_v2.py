"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434): latent attention, and experts with a softmax router."""

from dataclasses import dataclass, replace

from archon.models.args.latent import LATENT_FIELDS, LATENT_HF_MAP, LatentModelArgs
from archon.models.args.moe import GROUP_ROUTED_FIELDS
from archon.models.base import BaseArchonModel
from archon.models.hf.checks import require
from archon.models.hf.config import Field, dense_fields, with_defaults
from archon.models.layers.moe import ExpertsLayer
from archon.models.spec import define_family

_METHODS = ("greedy", "group_limited_greedy")
_FIELDS = (
    dense_fields(LATENT_FIELDS, num_key_value_heads=0, max_position_embeddings=2048)
    | with_defaults(GROUP_ROUTED_FIELDS, n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=0)
    | {
        "moe_intermediate_size": Field("moe_hidden_dim", int, 1407),
        "n_group": Field("n_group", int, 1, null=1),
        "topk_group": Field("topk_group", int, 1, null=1),
        "topk_method": Field("topk_method", str, "greedy"),
    }
)


@dataclass
class DeepseekV2ModelArgs(LatentModelArgs):
    """Arguments of DeepSeek-V2, see `LatentModelArgs`.

    Attributes:
        topk_method: `greedy`, or `group_limited_greedy` to choose within the groups with the best experts.
    """

    topk_method: str = "greedy"

    model_types = frozenset({"deepseek_v2"})
    hf_aliases = {"num_experts": "n_routed_experts"}
    # transformers ignores norm_topk_prob.
    hf_fixed_values = {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "pretraining_tp": 1}
    hf_fields = {
        name: field
        for name, field in _FIELDS.items()
        if name not in ("norm_topk_prob", "rope_interleave", "num_nextn_predict_layers", "num_mtp_layers")
    }
    hf_examples = {"topk_method": _METHODS}

    def __post_init__(self) -> None:
        is_known = self.topk_method in _METHODS
        require(is_known, f"topk_method is {self.topk_method!r}; expected one of {', '.join(_METHODS)}")
        super().__post_init__()

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        groups = (1, 1) if self.topk_method == "greedy" else (self.n_group, self.topk_group)
        routed = replace(super().experts(), score="softmax", correction_bias=False, normalize=False, group_best=1)
        return replace(routed, n_groups=groups[0], top_groups=groups[1])


DeepseekV2Model = BaseArchonModel[DeepseekV2ModelArgs]
DeepseekV2StateDictAdapter, parallelize_deepseek_v2, SPEC = define_family("deepseek_v2", DeepseekV2Model, LATENT_HF_MAP)
