"""PyTorch's variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision.

With sinks and shared prefixes it is tested against a reference of its interface, its forward is traced by `make
test-cuda-traced`, and `make test-gpu` compares its gradients with float64.
"""

from __future__ import annotations

import abc
import functools
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments
from archon.models.attention.prefix.cascade import Bounds, cascade_attention
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.sinks import KernelWithLse, attention_with_sinks
from archon.models.attention.spec import AttentionSpec
from archon.parallel.torch_private import require_private_apis, varlen_attn_backward


@dataclass
class FlashKernel(KernelWithLse):
    """A FlashAttention kernel for fixed boundaries of queries and keys."""

    queries: Bounds
    keys: Bounds
    spec: AttentionSpec

    @property
    def window(self) -> tuple[int, int]:
        """(left, right): neighbors that a token attends to besides itself; -1 for all."""
        return -1 if self.spec.window is None else self.spec.window - 1, 0 if self.spec.causal else -1

    @abc.abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention without sinks [T, H, D]; differentiable."""


def _attend(q: Tensor, k: Tensor, v: Tensor, kernel: FlashKernel) -> Tensor:
    sinks = kernel.spec.sinks
    return kernel.attend(q, k, v) if sinks is None else attention_with_sinks(q, k, v, sinks, kernel)


class FlashKernelBackend(AttentionBackend):
    """Backend of a FlashAttention kernel.

    Attributes:
        kernel: the kernel's class.
    """

    kernel: ClassVar[type[FlashKernel]]

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        return flash_unsupported_reason(device, dtype)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_packed`."""
        bounds = Bounds(documents.cu_seqlens, documents.max_seqlen)
        return _attend(q, k, v, self.kernel(bounds, bounds, spec))

    def attend_prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_prefixed`."""
        return cascade_attention(q, k, v, shared.cascade, shared.trees, spec, _attend, self.kernel)


class _Varlen(FlashKernel):
    """`varlen_attn`."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        (cu_q, max_q), (cu_k, max_k) = self.queries, self.keys
        if q.shape[1] != k.shape[1] and _has_enable_gqa():
            options["enable_gqa"] = True
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=self.spec.scale, window_size=self.window, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `FlashKernel.attend`."""
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

    name = "varlen"
    features = frozenset({"window", "sinks", "bidirectional"})
    saved_ops = frozenset({"torch_attn::_varlen_attn"})
    kernel = _Varlen

    def prepare_gathered(self, keys: GatheredKeys) -> None:
        """See `AttentionBackend.prepare_gathered`."""
        _ = keys.chunk_rows, keys.cu_seqlens

    def attend_gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_gathered`."""
        # The kernel aligns the last query with the last key, so a chunk's queries are the last of its keys.
        k, v = keys.by_chunk(kv)
        cu_q, cu_k = keys.cu_seqlens
        return _attend(q, k, v, _Varlen(Bounds(cu_q, keys.max_queries), Bounds(cu_k, keys.max_keys), spec))


@functools.cache
def _check_parts() -> None:
    require_private_apis("varlen")


@functools.cache
def _has_enable_gqa() -> bool:
    """Return whether this torch needs `enable_gqa` for grouped-query attention, as 2.13 does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
