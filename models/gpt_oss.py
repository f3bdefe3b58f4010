"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, alternating windows, and biased experts that clamp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, layer_type_windows
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP, HFMap
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.models.layers.moe import ExpertsLayer
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_HF, _EXPERTS = "model.layers.{}.mlp.", "layers.{}.moe.experts."


@dataclass
class GptOssModelArgs(MoEModelArgs):
    """See `MoEModelArgs`.

    Attributes:
        swiglu_alpha, swiglu_limit: see `ClampedSwiGLU`.
    """

    norm_topk_prob: bool = True
    norm_rounds_once: bool = True
    attention_sinks: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    model_types: ClassVar[frozenset[str]] = frozenset({"gpt_oss"})
    hf_aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    hf_windows: ClassVar[WindowPolicy] = layer_type_windows(default=128, pattern=2)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(theta=150_000.0, parameters=_ROPE)
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    ) | {
        "head_dim": Field("head_dim", int, 64, null=0),
        "attention_bias": Field("attention_bias", bool, True),
        "hidden_act": Field("", str, "silu"),
        "num_local_experts": Field("n_experts", int, 128),
        "num_experts_per_tok": Field("n_experts_per_token", int, 4),
        "swiglu_alpha": Field("swiglu_alpha", float, 1.702),
        "swiglu_limit": Field("swiglu_limit", float, 7.0),
        "router_aux_loss_coef": Field("", float, 0.001),
        # Other names of two fields in the published configs, which transformers does not read.
        "experts_per_token": Field("", int, 4),
        "initial_context_length": Field("", int, 4096),
    }
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"swiglu_limit": (0.5, 1.0, 7.0)}

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        self.moe_hidden_dim = self.hidden_dim
        super().__post_init__()

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        act = ClampedSwiGLU(self.swiglu_alpha, self.swiglu_limit)
        return replace(super().experts(), hidden_act=act, router_bias=True, expert_biases=True)


class GptOssModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `GptOssModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = GptOssModelArgs


class GptOssStateDictAdapter(BaseStateDictAdapter):
    """The common names, sinks, and all experts of a layer in one tensor of each kind: matrices [E, in, out], and the
    columns of gate and up in turns."""

    model_class = GptOssModel
    from_hf_map: ClassVar[HFMap] = DENSE_HF_MAP | {
        "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
        f"{_HF}router.weight": "layers.{}.moe.router.gate.weight",
        f"{_HF}router.bias": "layers.{}.moe.router.gate.bias",
        f"{_HF}experts.gate_up_proj": Fused(
            (f"{_EXPERTS}w1", f"{_EXPERTS}w3"), dim=1, interleaved=True, transposed=True
        ),
        f"{_HF}experts.gate_up_proj_bias": Fused((f"{_EXPERTS}b1", f"{_EXPERTS}b3"), dim=1, interleaved=True),
        f"{_HF}experts.down_proj": Fused((f"{_EXPERTS}w2",), transposed=True),
        f"{_HF}experts.down_proj_bias": f"{_EXPERTS}b2",
    }


parallelize_gpt_oss = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("gpt_oss", GptOssStateDictAdapter, parallelize_gpt_oss)
