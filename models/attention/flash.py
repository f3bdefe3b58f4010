"""The flash-attn package (Dao 2023, arXiv:2307.08691), an optional dependency.

Tested against a reference of flash-attn's interface; not yet verified on a GPU.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.documents import PackedDocuments
from archon.models.attention.spec import AttentionSpec


class FlashAttention(AttentionBackend):
    """`flash_attn_varlen_func`."""

    name = "flash"
    saved_ops = frozenset({"flash_attn::_flash_attn_varlen_forward"})

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        reason = flash_unsupported_reason(device, dtype)
        if reason is None and importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed (pip install 'archon-engine[flash]')"
        return reason

    def packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=documents.cu_seqlens,
            cu_seqlens_k=documents.cu_seqlens,
            max_seqlen_q=documents.max_seqlen,
            max_seqlen_k=documents.max_seqlen,
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=True,
            # (left, right): neighbors that a token sees besides itself; -1 for all.
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
        )
