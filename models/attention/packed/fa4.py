"""FlashAttention-4 (package flash-attn-4, module flash_attn.cute) for Hopper and Blackwell GPUs; optional.

Tested against a reference of the package's interface, version 4.0.0b36. On one H100 its results agree with
FlashAttention-2 to 3e-3 in bfloat16, and it takes 56 to 59 % of the time.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from archon.models.attention.backend import import_failure
from archon.models.attention.packed.flash_kernel import OPERATOR, FlashKernel, FlashKernelBackend, attend_by_operator
from archon.models.attention.spec import AttentionSpec

PACKAGE, MIN_VERSION = "flash-attn-4", "4.0.0b36"
INSTALL = f"pip install 'archon-engine[{PACKAGE}]'"
HOPPER, BLACKWELL = 9, (10, 11)
"""Major compute capabilities; the kernels for 8 and 12 lack a backward or its options."""


class _Fa4(FlashKernel):
    """The two halves of `flash_attn_varlen_func`: its autograd function cannot be compiled or merged."""

    name = "fa4"

    def _options(self) -> dict[str, Any]:
        """Return the options that both halves share; None, and not -1, is a window of all keys."""
        window = self.spec.window
        left = None if window is None or window >= self.keys.longest else window - 1
        return {
            "cu_seqlens_q": self.queries.cu_seqlens,
            "cu_seqlens_k": self.keys.cu_seqlens,
            "max_seqlen_q": self.queries.longest,
            "max_seqlen_k": self.keys.longest,
            "softmax_scale": self.spec.scale,
            "causal": self.spec.causal,
            "softcap": self.spec.soft_cap or 0.0,
            "window_size_left": left,
            "window_size_right": 0 if self.spec.causal else None,
        }

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `FlashKernel.attend`."""
        return attend_by_operator(q, k, v, self)

    attend_without_sinks = attend

    def forward_with_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward_with_sinks`; the kernel adds the sinks."""
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, learnable_sink=self.spec.sinks, return_lse=True, **self._options())
        return out, lse

    def backward_with_sinks(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """See `FlashKernel.backward_with_sinks`."""
        from flash_attn.cute.interface import _flash_attn_bwd

        grads: tuple[Tensor, ...] = _flash_attn_bwd(
            q, k, v, out, grad, lse, learnable_sink=self.spec.sinks, **self._options()
        )
        return grads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self.spec.sinks is None
        return self.forward_with_sinks(q, k, v)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.spec.sinks is None
        dq, dk, dv = self.backward_with_sinks(grad, q, k, v, out, lse)
        return dq, dk, dv


class FlashAttention4(FlashKernelBackend):
    """`flash_attn.cute.flash_attn_varlen_func`."""

    name = _Fa4.name
    features = frozenset({"window", "soft_cap", "sinks", "bidirectional"})
    saved_ops = frozenset({OPERATOR})
    kernel = _Fa4

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        if (reason := super().unsupported_reason(device, dtype)) is not None:
            return reason
        try:
            version = TorchVersion(importlib.metadata.version(PACKAGE))
        except importlib.metadata.PackageNotFoundError:
            version = None
        if torch.cuda.is_available() and (major := _capability()) not in (HOPPER, *BLACKWELL):
            return f"it needs compute capability 9 to 11, and the GPU has {major}"
        if version is None:
            return f"{PACKAGE} is not installed ({INSTALL})"
        if version < MIN_VERSION:
            return f"{PACKAGE} is {version}; expected at least {MIN_VERSION} ({INSTALL})"
        return import_failure("flash_attn.cute.interface")

    def layer_unsupported_reason(self, spec: AttentionSpec, head_dim: int) -> str | None:
        """See `AttentionBackend.layer_unsupported_reason`."""
        if (reason := super().layer_unsupported_reason(spec, head_dim)) is not None:
            return reason
        if head_dim % 8 == 0 and 8 <= head_dim <= (256 if _capability() == HOPPER else 128):
            return None
        if head_dim == 256 and spec.sinks is None and spec.soft_cap is None:
            return None
        return (
            f"attn_type {self.name!r} does not support this layer's {head_dim} features per head; it supports "
            "multiples of 8 up to 256 on Hopper; on Blackwell up to 128, and 256 without sinks and soft cap"
        )


@torch.compiler.assume_constant_result
def _capability() -> int:
    """Return the major compute capability of the current GPU."""
    return torch.cuda.get_device_capability()[0]
