"""The flash-attn package (Dao 2023, arXiv:2307.08691), an optional dependency.

Tested against a reference of flash-attn's interface, and its forward is traced by `make test-cuda-traced`; not yet
verified on a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import import_failure
from archon.models.attention.packed.flash_kernel import OPERATOR, FlashKernel, FlashKernelBackend


class _Flash(FlashKernel):
    """`flash_attn_varlen_func`, with its forward and backward as two halves."""

    name = "flash"

    def _options(self) -> dict[str, Any]:
        """Return the options that the function and its two halves share."""
        return {
            "cu_seqlens_q": self.queries.cu_seqlens,
            "cu_seqlens_k": self.keys.cu_seqlens,
            "max_seqlen_q": self.queries.longest,
            "max_seqlen_k": self.keys.longest,
            "dropout_p": 0.0,
            "softmax_scale": self.spec.scale,
            "causal": self.spec.causal,
            "softcap": self.spec.soft_cap or 0.0,
        }

    def _half_options(self) -> dict[str, Any]:
        left, right = self.window
        return self._options() | {"window_size_left": left, "window_size_right": right, "alibi_slopes": None}

    def attend_without_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `FlashKernel.attend_without_sinks`."""
        from flash_attn import flash_attn_varlen_func

        out: Tensor = flash_attn_varlen_func(q, k, v, window_size=self.window, **self._options())
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, **self._half_options())
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(grad, q, k, v, out, lse, dq, dk, dv, **self._half_options(), deterministic=False)
        return dq, dk, dv


class FlashAttention(FlashKernelBackend):
    """`flash_attn_varlen_func`."""

    name = _Flash.name
    features = frozenset({"window", "soft_cap", "sinks", "bidirectional"})
    saved_ops = frozenset({"flash_attn::_flash_attn_varlen_forward", OPERATOR})
    kernel = _Flash

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        reason = super().unsupported_reason(device, dtype)
        # flash-attn-4 installs a directory flash_attn too, without `__init__.py`.
        package = importlib.util.find_spec("flash_attn") if reason is None else None
        if reason is None and (package is None or package.origin is None):
            return "flash-attn is not installed (pip install 'archon-engine[flash]')"
        return import_failure("flash_attn.flash_attn_interface") if reason is None else reason

    @property
    def supports_gathered(self) -> bool:
        """See `AttentionBackend.supports_gathered`; not tested with more keys than queries."""
        return False
