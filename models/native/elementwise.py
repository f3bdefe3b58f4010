"""The elementwise layers of `kernels.c`, for the generator: a call takes a fifth of the time that PyTorch's take.

They compute in inference mode alone, where nothing is recorded for a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.native.library import kernels

_PARALLEL = 1 << 15
"""Entries from which a second thread is worth waking."""


def applies(x: Tensor, *others: Tensor) -> bool:
    """Returns whether the kernels compute with these: float32 on a CPU, in inference mode, with dense last dimensions
    and at most three of them."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and type(x) is Tensor
        and x.is_cpu
        and x.ndim <= 3
        and _is_dense(x)
        and all(map(_is_dense, others))
        and kernels() is not None
    )


def _is_dense(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.stride(-1) == 1


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Returns (offset + weight) * x / sqrt(mean(x^2) + eps) for x [..., d] and weight [d]."""
    functions = kernels()
    assert functions is not None and weight.shape == x.shape[-1:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    functions["rms_norm"](out.data_ptr(), x.data_ptr(), weight.data_ptr(), *_layout(x), eps, offset, _threads(x))
    return out


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """Returns x [T, H, d], or its `rms_norm` if that has a weight [d], with the first r features rotated in pairs by
    the angles of cos and sin [T, 1, r/2]."""
    functions, pairs = kernels(), cos.shape[-1]
    assert functions is not None and cos.shape == sin.shape == (len(x), 1, pairs) and 2 * pairs <= x.shape[-1]
    assert weight is None or weight.shape == x.shape[-1:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cos, sin = cos.contiguous(), sin.contiguous()
    pointers = out.data_ptr(), x.data_ptr(), None if weight is None else weight.data_ptr()
    angles = cos.data_ptr(), sin.data_ptr()
    functions["rotate"](*pointers, *angles, *_layout(x), pairs, interleaved, eps, offset, _threads(x))
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up for two tensors [..., d]."""
    functions, features = kernels(), gate.shape[-1]
    assert functions is not None and gate.shape == up.shape
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = gate.reshape(-1, features), up.reshape(-1, features)
    functions["swiglu"](
        out.data_ptr(), gate.data_ptr(), up.data_ptr(), *gate.shape, gate.stride(0), up.stride(0), _threads(gate)
    )
    return out


def store_rows(memory: Tensor, places: Tensor, x: Tensor) -> None:
    """Store x [T, H, d] at `places`, int64 [T H], of memory [n, d]. Raises IndexError where a place is none."""
    functions = kernels()
    assert functions is not None and memory.is_contiguous() and places.is_contiguous() and places.dtype == torch.int64
    assert x.ndim == 3 and memory.shape[1] == x.shape[2] and len(places) == x.shape[0] * x.shape[1]
    pointers = memory.data_ptr(), x.data_ptr(), places.data_ptr()
    if functions["store_rows"](*pointers, *_layout(x), len(memory)):
        raise IndexError(f"places of {len(places)} rows exceed the memory's {len(memory)}")


def _layout(x: Tensor) -> tuple[int, int, int, int, int]:
    """Returns rows, heads, features, and the strides of the first two, of x [rows, heads, features] or with fewer."""
    shape, strides = (1, 1, *x.shape)[-3:], (0, 0, *x.stride())[-3:]
    if x.ndim == 2:
        return shape[1], 1, shape[2], strides[1], 0
    return *shape, strides[0], strides[1]


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= _PARALLEL else 1
