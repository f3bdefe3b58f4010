"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from dataclasses import dataclass

from archon.models.args.moe import LOCAL_EXPERT_FIELDS, SEVERAL_EXPERTS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import NULLABLE_HEAD_DIM, dense_fields, uniform_window, with_defaults
from archon.models.hf.names import BLOCK_SPARSE_HF_MAP, DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.spec import define_family


@dataclass
class MixtralModelArgs(MoEModelArgs):
    """Arguments of Mixtral, see `MoEModelArgs`."""

    n_experts: int = 8
    n_experts_per_token: int = 2
    norm_topk_prob: bool = True

    model_types = frozenset({"mixtral"})
    has_no_dense_layers = True
    hf_windows = uniform_window(default=None)
    hf_ropes = RopePolicy(theta=1_000_000.0)
    hf_aliases = {"num_experts": "num_local_experts"}
    hf_fixed_values = {"router_jitter_noise": 0.0}
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    ) | with_defaults(LOCAL_EXPERT_FIELDS, num_local_experts=8, num_experts_per_tok=2)
    hf_examples = SEVERAL_EXPERTS


MixtralModel = BaseArchonModel[MixtralModelArgs]
MixtralStateDictAdapter, parallelize_mixtral, SPEC = define_family(
    "mixtral", MixtralModel, DENSE_HF_MAP | BLOCK_SPARSE_HF_MAP
)
