"""Command A and R7B (Cohere 2025, arXiv:2504.00698): parallel blocks, layer norms, full attention without RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archon.models.args.base import MIN_FACTOR
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.checks import require
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, Field, dense_fields, layer_type_windows
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family

_WINDOWS = layer_type_windows(default=4096, pattern=4, pattern_field="sliding_window_pattern")
_FIELDS = dense_fields(
    ATTENTION_BIAS,
    HEAD_DIM,
    num_key_value_heads=0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    pad_token_id=0,
)


def _rotated_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return a flag per layer: RoPE in the sliding layers."""
    return [window is not None for window in _WINDOWS.read(config, n_layers)[1]]


@dataclass
class Cohere2ModelArgs(BaseModelArgs):
    """Arguments of Command R7B and A, see `BaseModelArgs`.

    Attributes:
        logit_scale: Factor on the logits.
    """

    logit_scale: float = 0.0625
    rope_interleaved: bool = True
    norm_centered: bool = True
    norm_placement: NormPlacement = "parallel"

    model_types = frozenset({"cohere2"})
    biases_all_projections = True
    hf_windows = _WINDOWS
    hf_ropes = RopePolicy(fields=_WINDOWS.fields, positions=_rotated_layers)
    # Fields of the published configs that transformers ignores.
    hf_fixed_values = {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    }
    hf_fields = {name: field for name, field in _FIELDS.items() if name != "rms_norm_eps"} | {
        "layer_norm_eps": Field("norm_eps", float, 1e-5),
        "logit_scale": Field("logit_scale", float, 0.0625),
    }

    def __post_init__(self) -> None:
        require(self.logit_scale > MIN_FACTOR, f"logit_scale is {self.logit_scale}; expected a number above 0")
        self.logits_divisor = 1 / self.logit_scale
        super().__post_init__()
        expected = f"expected dim {self.dim} / n_heads {self.n_heads}"
        require(self.head_dim == self.dim // self.n_heads, f"head_dim is {self.head_dim}; {expected}")


Cohere2Model = BaseArchonModel[Cohere2ModelArgs]
Cohere2StateDictAdapter, parallelize_cohere2, SPEC = define_family("cohere2", Cohere2Model, DENSE_HF_MAP)
