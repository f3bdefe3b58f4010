"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219): dense decoder; its checkpoints fuse wq, wk, wv and w1, w3."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import HEAD_DIM, dense_fields, uniform_window
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP, FUSED_GATE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.spec import define_family


@dataclass
class Phi3ModelArgs(BaseModelArgs):
    """Arguments of Phi-3, see `BaseModelArgs`; RoPE may rotate a fraction of each head."""

    model_types = frozenset({"phi3"})
    hf_windows = uniform_window(default=None)
    hf_ropes = RopePolicy(kinds=("default", "longrope"), original_length=4096, partial=1.0)
    hf_fields = dense_fields(
        HEAD_DIM, num_key_value_heads=0, max_position_embeddings=4096, rms_norm_eps=1e-5, pad_token_id=32000
    )
    hf_fixed_values = {"attention_bias": False}


_FUSED = FUSED_GATE_HF_MAP | {
    "model.layers.{}.self_attn.qkv_proj.weight": Fused(
        tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv"))
    ),
}

Phi3Model = BaseArchonModel[Phi3ModelArgs]
Phi3StateDictAdapter, parallelize_phi3, SPEC = define_family("phi3", Phi3Model, DENSE_HF_MAP | _FUSED)
