"""OLMo 3 (Ai2 2025): norms after attention and feed-forward network, full-width QK norms, sliding windows."""

from dataclasses import dataclass, replace

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, dense_fields, layer_type_windows
from archon.models.hf.names import DENSE_HF_MAP, POST_NORMS_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.rope import RopeSpec
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family


@dataclass
class Olmo3ModelArgs(BaseModelArgs):
    """Arguments of OLMo 3, see `BaseModelArgs`; RoPE scaling applies to the layers with full attention."""

    qk_norm: bool = True
    full_width_qk_norm: bool = True
    norm_rounds_once: bool = True
    norm_placement: NormPlacement = "after"

    model_types = frozenset({"olmo3"})
    biases_all_projections = True
    hf_windows = layer_type_windows(default=4096, pattern=4)
    hf_ropes = RopePolicy(theta=500_000.0, local_theta=500_000.0)
    hf_fields = dense_fields(
        HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=0, max_position_embeddings=2048, rms_norm_eps=1e-5, pad_token_id=1
    )

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`; cos and sin stay in float32."""
        spec = super().rope(layer)
        return None if spec is None else replace(spec, rounds_once=True)


Olmo3Model = BaseArchonModel[Olmo3ModelArgs]
Olmo3StateDictAdapter, parallelize_olmo3, SPEC = define_family(
    "olmo3", Olmo3Model, DENSE_HF_MAP | QK_NORM_HF_MAP | POST_NORMS_HF_MAP
)
