"""Interface of FlashAttention kernels (Dao 2023, arXiv:2307.08691), and one operator for all of them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments
from archon.models.attention.prefix.cascade import Bounds, cascade_attention
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.sinks import KernelWithLse, attention_with_sinks, merge_sinks, sinks_grad
from archon.models.attention.spec import AttentionSpec

OPERATOR = "archon::flash_attention"

_KERNELS: dict[str, type[FlashKernel]] = {}


@dataclass
class FlashKernel(KernelWithLse):
    """A FlashAttention kernel for fixed boundaries of queries and keys.

    Attributes:
        name: the `attn_type` of its backend.
    """

    name: ClassVar[str]
    queries: Bounds
    keys: Bounds
    spec: AttentionSpec

    def __init_subclass__(cls) -> None:
        _KERNELS[cls.name] = cls

    @property
    def window(self) -> tuple[int, int]:
        """(left, right): neighbors that a token attends to besides itself; -1 for all."""
        return -1 if self.spec.window is None else self.spec.window - 1, 0 if self.spec.causal else -1

    @abc.abstractmethod
    def attend_without_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention without sinks [T, H, D]; differentiable."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention [T, H, D]; differentiable."""
        if self.spec.sinks is None:
            return self.attend_without_sinks(q, k, v)
        if torch.compiler.is_compiling():
            return attend_by_operator(q, k, v, self)
        return attention_with_sinks(q, k, v, self.spec.sinks, self)

    def forward_with_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention [T, H, D] and the log-sum-exp [H, T], both with the sinks of the spec."""
        out, lse = self.forward(q, k, v)
        return (out, lse) if self.spec.sinks is None else merge_sinks(out, lse, self.spec.sinks)

    def backward_with_sinks(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and the sinks, if there are any, from `forward_with_sinks`."""
        grads = self.backward(grad, q, k, v, out, lse)
        return grads if self.spec.sinks is None else (*grads, sinks_grad(grad, out, lse, self.spec.sinks))


def _attend(q: Tensor, k: Tensor, v: Tensor, kernel: FlashKernel) -> Tensor:
    return kernel.attend(q, k, v)


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
        return self.kernel(bounds, bounds, spec).attend(q, k, v)

    def prepare_gathered(self, keys: GatheredKeys) -> None:
        """See `AttentionBackend.prepare_gathered`."""
        _ = keys.chunk_rows, keys.cu_seqlens

    def attend_gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_gathered`."""
        # The kernel aligns the last query with the last key, so a chunk's queries are the last of its keys.
        k, v = keys.by_chunk(kv)
        cu_q, cu_k = keys.cu_seqlens
        return self.kernel(Bounds(cu_q, keys.max_queries), Bounds(cu_k, keys.max_keys), spec).attend(q, k, v)

    def attend_prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_prefixed`."""
        return cascade_attention(q, k, v, shared.cascade, spec, _attend, self.kernel)


# One operator, which torch.compile does not trace. Its arguments rebuild the kernel.


def attend_by_operator(q: Tensor, k: Tensor, v: Tensor, kernel: FlashKernel) -> Tensor:
    """Return attention [T, H, D] of a kernel with its sinks, as one operator; differentiable."""
    (cu_q, max_q), (cu_k, max_k), spec = kernel.queries, kernel.keys, kernel.spec
    options = spec.scale, spec.window, spec.soft_cap, spec.causal, kernel.name
    out, _ = torch.ops.archon.flash_attention(q, k, v, spec.sinks, cu_q, cu_k, [max_q, max_k], *options)
    return out


def _kernel(
    sinks: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: list[int],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
    name: str,
) -> FlashKernel:
    spec = AttentionSpec(scale, window, soft_cap, sinks, causal=causal)
    return _KERNELS[name](Bounds(cu_q, longest[0]), Bounds(cu_k, longest[1]), spec)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: list[int],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
    name: str,
) -> tuple[Tensor, Tensor]:
    kernel = _kernel(sinks, cu_q, cu_k, longest, scale, window, soft_cap, causal, name)
    out, lse = kernel.forward_with_sinks(q, k, v)
    return out.contiguous(), lse.contiguous()


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _backward_operator(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: list[int],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
    name: str,
) -> list[Tensor]:
    kernel = _kernel(sinks, cu_q, cu_k, longest, scale, window, soft_cap, causal, name)
    grads = kernel.backward_with_sinks(grad.contiguous(), q, k, v, out, lse)
    return [x.contiguous() for x in grads]


@_backward_operator.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:4] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.constants = inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.archon.flash_attention_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return *grads, *[None] * (6 + len(ctx.constants) - len(grads))


_operator.register_autograd(_backward, setup_context=_setup_context)
