"""ERNIE 4.5 dense (Baidu 2025): Llama with interleaved RoPE."""

from dataclasses import dataclass, replace

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, dense_fields
from archon.models.hf.rope import RopePolicy
from archon.models.layers.rope import RopeSpec
from archon.models.spec import define_family


@dataclass
class Ernie4_5ModelArgs(BaseModelArgs):  # noqa: N801 - the name in transformers
    """Arguments of ERNIE 4.5, see `BaseModelArgs`."""

    rope_interleaved: bool = True

    model_types = frozenset({"ernie4_5"})
    hf_ropes = RopePolicy(theta=500_000.0)
    hf_fixed_values = {"use_bias": False}
    hf_fields = dense_fields(
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
    ) | {"head_dim": Field("head_dim", int, 128, null=0)}

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`; cos and sin stay in float32."""
        spec = super().rope(layer)
        return None if spec is None else replace(spec, rounds_once=True)


Ernie4_5Model = BaseArchonModel[Ernie4_5ModelArgs]
Ernie4_5StateDictAdapter, parallelize_ernie4_5, SPEC = define_family("ernie4_5", Ernie4_5Model)
