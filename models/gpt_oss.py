"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, alternating windows, clamped experts with biases."""

from dataclasses import dataclass, replace

from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import Field, dense_fields, layer_type_windows
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.models.layers.moe import ExpertsLayer
from archon.models.spec import define_family

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass
class GptOssModelArgs(MoEModelArgs):
    """Arguments of gpt-oss, see `MoEModelArgs`.

    Attributes:
        swiglu_alpha, swiglu_limit: See `ClampedSwiGLU`.
    """

    norm_topk_prob: bool = True
    norm_rounds_once: bool = True
    attention_sinks: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    model_types = frozenset({"gpt_oss"})
    biases_all_projections = True
    has_no_dense_layers = True
    hf_aliases = {"num_experts": "num_local_experts"}
    hf_windows = layer_type_windows(default=128, pattern=2)
    hf_ropes = RopePolicy(theta=150_000.0, parameters=_ROPE)
    hf_fields = dense_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5) | {
        "head_dim": Field("head_dim", int, 64, null=0),
        "attention_bias": Field("attention_bias", bool, True),
        "hidden_act": Field("", str, "silu"),
        "num_local_experts": Field("n_experts", int, 128),
        "num_experts_per_tok": Field("n_experts_per_token", int, 4),
        "swiglu_alpha": Field("swiglu_alpha", float, 1.702),
        "swiglu_limit": Field("swiglu_limit", float, 7.0),
        "router_aux_loss_coef": Field("", float, 0.001),
        # Aliases of two fields in the published configs; transformers does not read them.
        "experts_per_token": Field("", int, 4),
        "initial_context_length": Field("", int, 4096),
    }
    hf_examples = {"swiglu_limit": (0.5, 1.0, 7.0)}

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        act = ClampedSwiGLU(self.swiglu_alpha, self.swiglu_limit)
        return replace(super().experts(), hidden_act=act, router_bias=True, expert_biases=True)


_HF, _EXPERTS = "model.layers.{}.mlp.", "layers.{}.moe.experts."
# One tensor per kind holds all experts of a layer: matrices [E, in, out], with interleaved gate and up columns.
_EXPERTS_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
    f"{_HF}router.weight": "layers.{}.moe.router.gate.weight",
    f"{_HF}router.bias": "layers.{}.moe.router.gate.bias",
    f"{_HF}experts.gate_up_proj": Fused((f"{_EXPERTS}w1", f"{_EXPERTS}w3"), dim=1, interleaved=True, transposed=True),
    f"{_HF}experts.gate_up_proj_bias": Fused((f"{_EXPERTS}b1", f"{_EXPERTS}b3"), dim=1, interleaved=True),
    f"{_HF}experts.down_proj": Fused((f"{_EXPERTS}w2",), transposed=True),
    f"{_HF}experts.down_proj_bias": f"{_EXPERTS}b2",
}

GptOssModel = BaseArchonModel[GptOssModelArgs]
GptOssStateDictAdapter, parallelize_gpt_oss, SPEC = define_family("gpt_oss", GptOssModel, DENSE_HF_MAP | _EXPERTS_MAP)
