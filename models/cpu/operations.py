"""Layers, matmuls and sampling by `kernels.c`, in float32 on a CPU.

Elementwise layers take a fifth of the time of PyTorch's operations for few rows. They record no gradient:
`archon.models.cpu.fused` calls them within autograd functions. Sampling is one call and two passes over the logits;
PyTorch needs twenty calls and ten passes. Matmuls with packed weights are a tenth to a sixth faster than oneDNN with
few rows, as in a decoding step, and the result of a row does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.cpu.library import kernel, kernels

PARALLEL = 1 << 15
"""Minimum entries that repay waking a second thread."""
PARALLEL_PRODUCTS = 1 << 18
"""Minimum multiplications of a matmul that repay it."""


def can_use(x: Tensor, *operands: Tensor) -> bool:
    """Return whether the kernels support these tensors.

    They take float32 on a CPU, outside compiled code, with at most three dimensions and a dense last one.
    """
    return (
        not torch.compiler.is_compiling()
        and 1 <= x.ndim <= 3
        and x.shape[-1] > 0
        and not torch.jit.is_tracing()
        and _is_dense(x)
        and all(map(_is_dense, operands))
        and kernels() is not None
    )


def _is_dense(x: Tensor) -> bool:
    """Return whether x is an ordinary dense float32 tensor; a subclass may have no memory."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_cpu
        and x.dtype == torch.float32
        and x.stride(-1) == 1
        and not x.is_neg()
    )


def _new(x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "a mode gives tensors without memory"
    return out


def _dense(grad: Tensor) -> Tensor:
    """Return a gradient with a dense last dimension; the gradient of a sum is expanded."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return (offset + weight) * x / sqrt(mean(x^2) + eps) for x [..., d] and weight [d]."""
    assert weight.shape == x.shape[-1:]
    out = _new(x)
    kernel("rms_norm")(out.data_ptr(), x.data_ptr(), weight.data_ptr(), *_layout(x), eps, offset, _threads(x))
    return out


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x [..., d] and, if needed, weight [d] of `rms_norm`."""
    grad = _dense(grad)
    assert grad.shape == x.shape and weight.shape == x.shape[-1:]
    x_grad = _new(x)
    weight_grad = torch.empty_like(weight) if needs_weight else None
    outs = x_grad.data_ptr(), None if weight_grad is None else weight_grad.data_ptr()
    pointers = grad.data_ptr(), x.data_ptr(), weight.data_ptr()
    if kernel("rms_norm_backward")(*outs, *pointers, *_layout(x), *_layout(grad)[-2:], eps, offset, _threads(x)):
        raise MemoryError(f"no memory for the gradient of a norm of {x.shape[-1]} features")
    return x_grad, weight_grad


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """Rotate the first r features of x [T, H, d] in pairs by the angles of cos and sin [T, 1, r/2].

    With a weight [d], x is first normalized by `rms_norm`.
    """
    pairs = cos.shape[-1]
    assert cos.shape == sin.shape == (len(x), 1, pairs) and 2 * pairs <= x.shape[-1]
    assert weight is None or weight.shape == x.shape[-1:]
    out = _new(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    pointers = out.data_ptr(), x.data_ptr(), None if weight is None else weight.data_ptr()
    angles = cos.data_ptr(), sin.data_ptr()
    kernel("rotate")(*pointers, *angles, *_layout(x), pairs, interleaved, eps, offset, _threads(x))
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up for two tensors [..., d]."""
    assert gate.shape == up.shape
    out, features = _new(gate), gate.shape[-1]
    gate, up = gate.reshape(-1, features), up.reshape(-1, features)
    pointers = out.data_ptr(), gate.data_ptr(), up.data_ptr()
    kernel("swiglu")(*pointers, *gate.shape, gate.stride(0), up.stride(0), _threads(gate))
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up [..., d] of `swiglu`."""
    assert grad.shape == gate.shape == up.shape
    outs = [_new(x) for x in (gate, up)]
    rows = [x.reshape(-1, gate.shape[-1]) for x in (_dense(grad), gate, up)]
    pointers, strides = [x.data_ptr() for x in (*outs, *rows)], [x.stride(0) for x in rows]
    kernel("swiglu_backward")(*pointers, *rows[1].shape, *strides, _threads(gate))
    return outs[0], outs[1]


def store_rows(memory: Tensor, places: Tensor, x: Tensor) -> None:
    """Store x [T, H, d] at rows `places`, int64 [T H], of memory [n, d]; IndexError for a row outside."""
    assert memory.is_contiguous() and places.is_contiguous() and places.dtype == torch.int64
    assert x.ndim == 3 and memory.shape[1] == x.shape[2] and len(places) == x.shape[0] * x.shape[1]
    pointers = memory.data_ptr(), x.data_ptr(), places.data_ptr()
    if kernel("store_rows")(*pointers, *_layout(x), len(memory)):
        raise IndexError(f"places of {len(places)} rows exceed the memory's {len(memory)}")


def _layout(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return rows, heads, features, and the strides of the first two, of x with at most three dimensions."""
    shape, strides = (1, 1, *x.shape)[-3:], (0, 0, *x.stride())[-3:]
    if x.ndim == 2:
        return shape[1], 1, shape[2], strides[1], 0
    return *shape, strides[0], strides[1]


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= PARALLEL else 1


def draw(logits: Tensor, temperature: np.ndarray, greedy: np.ndarray, uniform: np.ndarray) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature).

    Args:
        logits: [R, V] with V at least 1, two-dimensional and accepted by `can_use`.
        temperature: float64 [R], > 0.
        greedy: bool [R]; these rows take the most likely token.
        uniform: float64 [R] in [0, 1): position of each sampled token in the cumulative distribution.

    Returns:
        Tokens int64 [R], and their logprobs float32 [R], NaN for rows with non-finite logits.
    """
    rows, vocab = logits.shape
    assert temperature.shape == greedy.shape == uniform.shape == (rows,)
    inputs = [np.ascontiguousarray(x, dtype) for x, dtype in ((temperature, float), (greedy, bool), (uniform, float))]
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    threads = min(rows, torch.get_num_threads()) if logits.numel() >= PARALLEL else 1
    pointers = *(x.data_ptr() for x in (tokens, logprobs, logits)), *(x.ctypes.data for x in inputs)
    kernel("draw")(*pointers, rows, vocab, logits.stride(0), threads)
    return tokens, logprobs


@dataclass(frozen=True)
class PackedLinear:
    """Weight of a linear layer in panels of columns.

    Attributes:
        panels: [columns / width, in, width].
        bias: [columns]; None for none.
        columns: output features.
    """

    panels: Tensor
    bias: Tensor | None
    columns: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., columns] for x [..., in]."""
        depth = self.panels.shape[1]
        assert x.dtype == torch.float32 and x.shape[-1] == depth
        rows = x.reshape(-1, depth)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = x.new_empty(*x.shape[:-1], self.columns)
        threads = torch.get_num_threads() if len(rows) * depth * self.columns >= PARALLEL_PRODUCTS else 1
        bias = None if self.bias is None else self.bias.data_ptr()
        pointers = out.data_ptr(), rows.data_ptr(), self.panels.data_ptr(), bias
        kernel("product")(*pointers, *rows.shape, self.columns, rows.stride(0), threads)
        return out


def pack_weight(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """Return packed copies of weight [out, in] and bias [out]; None without kernels."""
    if kernels() is None:
        return None
    width = kernel("panel_width")()
    missing = -len(weight) % width
    panels = F.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, width)).transpose(1, 2).contiguous()
    return PackedLinear(panels, None if bias is None else bias.contiguous(), len(weight))
