"""PyTorch's variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision.

With sinks and shared prefixes it is tested against a reference of its interface, its forward is traced by `make
test-cuda-traced`, and `make test-gpu` compares its gradients with float64.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.packed.flash_kernel import OPERATOR, FlashKernel, FlashKernelBackend
from archon.parallel.torch_private import require_private_apis, varlen_attn_backward


class _Varlen(FlashKernel):
    """`varlen_attn`."""

    name = "varlen"

    def _run(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        (cu_q, max_q), (cu_k, max_k) = self.queries, self.keys
        if q.shape[1] != k.shape[1] and _has_enable_gqa():
            options["enable_gqa"] = True
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=self.spec.scale, window_size=self.window, **options)

    def attend_without_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `FlashKernel.attend_without_sinks`."""
        out: Tensor = self._run(q, k, v)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest

        _check_parts()
        out, lse = self._run(q, k, v, return_aux=AuxRequest(lse=True))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (cu_q, max_q), (cu_k, max_k) = self.queries, self.keys
        is_causal, no_dropout = self.window == (-1, 0), torch.zeros(2, dtype=torch.uint64, device=q.device)
        options = max_q, max_k, is_causal, no_dropout, self.spec.scale, list(self.window)
        return varlen_attn_backward(grad, q, k, v, out, lse, cu_q, cu_k, *options)


class VarlenAttention(FlashKernelBackend):
    """`varlen_attn`."""

    name = _Varlen.name
    features = frozenset({"window", "sinks", "bidirectional"})
    saved_ops = frozenset({"torch_attn::_varlen_attn", OPERATOR})
    kernel = _Varlen


@functools.cache
def _check_parts() -> None:
    require_private_apis("varlen")


@functools.cache
def _has_enable_gqa() -> bool:
    """Return whether this torch needs `enable_gqa` for grouped-query attention, as 2.13 does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
