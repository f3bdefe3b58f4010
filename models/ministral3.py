"""Ministral 3 (Mistral AI 2025): Mistral with YaRN and queries scaled by position."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.composite import LlavaStateDictAdapter
from archon.models.hf.config import NULLABLE_HEAD_DIM, CompositePolicy, dense_fields, uniform_window, with_defaults
from archon.models.hf.rope import RopePolicy
from archon.models.mistral import MistralModelArgs
from archon.models.spec import define_family

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_IMAGE_FIELDS = (
    "vision_config",
    "image_token_index",
    "spatial_merge_size",
    "vision_feature_layer",
    "projector_hidden_act",
    "multimodal_projector_bias",
)


@dataclass
class Ministral3ModelArgs(BaseModelArgs):
    """Arguments of Ministral 3, see `BaseModelArgs`."""

    model_types = frozenset({"ministral3", "mistral3"})
    composite_types = {"mistral3": "ministral3"}
    text_readers = {"mistral": MistralModelArgs}  # Mistral Small 3.1 and 3.2
    hf_composite = CompositePolicy(_IMAGE_FIELDS, ties=True)
    hf_windows = uniform_window(default=None)
    hf_ropes = RopePolicy(
        parameters=_ROPE, query_beta_field="llama_4_scaling_beta", ignored=frozenset({"max_position_embeddings"})
    )
    hf_fields = dense_fields(
        num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5, pad_token_id=11
    ) | with_defaults(NULLABLE_HEAD_DIM, head_dim=128)


Ministral3Model = BaseArchonModel[Ministral3ModelArgs]
Ministral3StateDictAdapter, parallelize_ministral3, SPEC = define_family(
    "ministral3", Ministral3Model, adapter=LlavaStateDictAdapter
)
