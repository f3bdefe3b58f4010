"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219): the shared decoder; its checkpoints fuse queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, uniform_window
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Phi3ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; no projection has a bias, and a share of each head may be rotated."""

    model_types: ClassVar[frozenset[str]] = frozenset({"phi3"})
    hf_windows: ClassVar[WindowPolicy] = uniform_window(default=None)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(kinds=("default", "longrope"), original_length=4096, partial=1.0)
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=0, max_position_embeddings=4096, rms_norm_eps=1e-5, pad_token_id=32000
    ) | {
        # transformers' Phi-3 uses `head_dim`, which its config class does not declare.
        "head_dim": Field("head_dim", int, 0),
    }
    hf_fixed_values: ClassVar[dict[str, Any]] = {
        "attention_bias": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }


class Phi3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Phi3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Phi3ModelArgs


class Phi3StateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders, of which some are fused."""

    model_class = Phi3Model
    from_hf_map = DENSE_HF_MAP | {
        "model.layers.{}.self_attn.qkv_proj.weight": Fused(
            tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv"))
        ),
        "model.layers.{}.mlp.gate_up_proj.weight": Fused(
            ("layers.{}.feed_forward.w1.weight", "layers.{}.feed_forward.w3.weight")
        ),
    }


parallelize_phi3 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("phi3", Phi3StateDictAdapter, parallelize_phi3)
