"""Small models of every family with sizes that kernels of CUDA take, on the traced device."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from archon.models import BaseArchonModel, get_model_spec
from archon.models.attention.meta import PackedAttention
from archon.tools.check.random_configs import draw_fields
from tests.cuda_traced.trace import CUDA

VOCAB = 64
LENGTHS = (5, 17, 1, 40, 40)
# Multiples of 8, as rows of 16 bytes in half precision need.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # `varlen` has no soft caps.
    "attn_logit_softcapping": None,
}


def family_config(family: str, *, rope_kind: str = "default", **fields: Any) -> dict[str, Any]:
    """Return a config.json of a family with these sizes and fields; the others are drawn."""
    args = get_model_spec(family, text_only=True).model_args_class
    names = frozenset({*args.hf_fields, *args.hf_windows.fields})
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return {"model_type": family} | draw_fields(0, family, rope_kind=rope_kind, **sizes | fields)


def build(config: dict[str, Any], attn_type: str, dtype: torch.dtype = torch.bfloat16, **args: Any) -> BaseArchonModel:
    """Return the model of a config on the device, with weights of no value."""
    spec = get_model_spec(config["model_type"], text_only="vision_config" not in config)
    with torch.device("meta"):
        model = spec.model_class(spec.model_args_class.from_hf_config(config, attn_type=attn_type, **args)).to(dtype)
    model.to_empty(device=CUDA)
    model.tie_weights()
    model.init_buffers(CUDA)
    return model


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of real tensors on the device."""
    return tuple(x.pin_memory().to(CUDA, non_blocking=True) for x in tensors)


class Pack:
    """A pack of documents of these lengths on the device."""

    def __init__(self, attn_type: str, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths, self.attn_type, self.tokens = lengths, attn_type, sum(lengths)
        ids, positions = torch.arange(self.tokens) % VOCAB, torch.cat([torch.arange(n) for n in lengths])
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.inputs = on_device(ids, positions, bounds)

    @property
    def attention(self) -> PackedAttention:
        """A new one for each forward, as the engine makes it."""
        return PackedAttention(self.inputs[2], max(self.lengths), self.attn_type, self.lengths)

    def run(self, model: BaseArchonModel, **head: Any) -> Any:
        """Return what the model's forward returns."""
        return model(*self.inputs, max(self.lengths), self.attention, **head)
