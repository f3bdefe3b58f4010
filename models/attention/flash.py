"""The flash-attn package (Dao 2023, arXiv:2307.08691), an optional dependency.

Tested against a reference of flash-attn's interface; not yet verified on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.documents import PackedDocuments
from archon.models.attention.sinks import KernelWithLse, attention_with_sinks
from archon.models.attention.spec import AttentionSpec


class FlashAttention(AttentionBackend):
    """`flash_attn_varlen_func`."""

    name = "flash"
    features = frozenset({"window", "soft_cap", "sinks", "bidirectional"})
    saved_ops = frozenset({"flash_attn::_flash_attn_varlen_forward"})

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        reason = flash_unsupported_reason(device, dtype)
        if reason is None and importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed (pip install 'archon-engine[flash]')"
        return reason

    def packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        if spec.sinks is not None:
            return attention_with_sinks(q, k, v, spec.sinks, _Flash(documents, spec))
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
            causal=spec.causal,
            # (left, right): neighbors that a token sees besides itself; -1 for all.
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.soft_cap or 0.0,
        )


@dataclass
class _Flash(KernelWithLse):
    """The two halves of `flash_attn_varlen_func`, which it has for itself."""

    documents: PackedDocuments
    spec: AttentionSpec

    @property
    def options(self) -> dict[str, Any]:
        cu_seqlens, max_seqlen, window = self.documents.cu_seqlens, self.documents.max_seqlen, self.spec.window
        return {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_k": max_seqlen,
            "dropout_p": 0.0,
            "softmax_scale": self.spec.scale,
            "causal": True,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": -1 if window is None else 0,
            "softcap": self.spec.soft_cap or 0.0,
            "alibi_slopes": None,
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, **self.options)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(grad, q, k, v, out, lse, dq, dk, dv, **self.options, deterministic=False)
        return dq, dk, dv
