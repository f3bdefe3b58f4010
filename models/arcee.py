"""AFM-4.5B (Arcee AI 2025): Llama with a feed-forward network of squared ReLU without a gate."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, MLP_BIAS, NULLABLE_HEAD_DIM, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, MLP_BIAS_HF_MAP
from archon.models.spec import define_family


@dataclass
class ArceeModelArgs(BaseModelArgs):
    """Arguments of AFM, see `BaseModelArgs`."""

    mlp_ungated: bool = True

    model_types = frozenset({"arcee"})
    biases_all_projections = True
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM,
        ATTENTION_BIAS,
        MLP_BIAS,
        num_key_value_heads=0,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        hidden_act="relu2",
    )


ArceeModel = BaseArchonModel[ArceeModelArgs]
ArceeStateDictAdapter, parallelize_arcee, SPEC = define_family("arcee", ArceeModel, DENSE_HF_MAP | MLP_BIAS_HF_MAP)
