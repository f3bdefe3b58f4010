"""The flash-attn package (Dao 2023, arXiv:2307.08691), an optional dependency.

Tested against a reference of flash-attn's interface, and its forward is traced by `make test-cuda-traced`; not yet
verified on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.packed.documents import PackedDocuments
from archon.models.attention.prefix.cascade import Bounds, cascade_attention
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.sinks import KernelWithLse, attention_with_sinks
from archon.models.attention.spec import AttentionSpec


class FlashAttention(AttentionBackend):
    """`flash_attn_varlen_func`."""

    name = "flash"
    features = frozenset({"window", "soft_cap", "sinks", "bidirectional"})
    saved_ops = frozenset({"flash_attn::_flash_attn_varlen_forward"})

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        reason = flash_unsupported_reason(device, dtype)
        if reason is None and importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed (pip install 'archon-engine[flash]')"
        return reason

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_packed`."""
        bounds = Bounds(documents.cu_seqlens, documents.max_seqlen)
        return _attend(q, k, v, _Flash(bounds, bounds, spec))

    def attend_prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_prefixed`."""
        return cascade_attention(q, k, v, shared.cascade, shared.trees, spec, _attend, _Flash)


def _attend(q: Tensor, k: Tensor, v: Tensor, kernel: _Flash) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    if kernel.spec.sinks is not None:
        return attention_with_sinks(q, k, v, kernel.spec.sinks, kernel)
    return flash_attn_varlen_func(q, k, v, window_size=kernel.window, softcap=kernel.soft_cap, **kernel.options)


@dataclass
class _Flash(KernelWithLse):
    """`flash_attn_varlen_func` for given boundaries, with its forward and backward as two halves."""

    queries: Bounds
    keys: Bounds
    spec: AttentionSpec

    @property
    def window(self) -> tuple[int, int]:
        """(left, right): neighbors that a token attends to besides itself; -1 for all."""
        if self.spec.window is None:
            return -1, -1
        return self.spec.window - 1, 0 if self.spec.causal else -1

    @property
    def soft_cap(self) -> float:
        return self.spec.soft_cap or 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Options that the function and its two halves share."""
        return {
            "cu_seqlens_q": self.queries.cu_seqlens,
            "cu_seqlens_k": self.keys.cu_seqlens,
            "max_seqlen_q": self.queries.longest,
            "max_seqlen_k": self.keys.longest,
            "dropout_p": 0.0,
            "softmax_scale": self.spec.scale,
            "causal": self.spec.causal,
        }

    @property
    def _autograd_options(self) -> dict[str, Any]:
        left, right = self.window
        window = {"window_size_left": left, "window_size_right": right}
        return self.options | window | {"softcap": self.soft_cap, "alibi_slopes": None}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, **self._autograd_options)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(grad, q, k, v, out, lse, dq, dk, dv, **self._autograd_options, deterministic=False)
        return dq, dk, dv
