"""Tokens drawn from logits by the function of `kernels.c`, in float32 on a CPU.

One call and two passes over the logits; PyTorch's operations are twenty calls and ten passes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from archon.models.cpu import elementwise
from archon.models.cpu.library import kernels


def can_use(logits: Tensor) -> bool:
    """Return whether the function draws from logits [R, V]: float32 on a CPU."""
    return logits.ndim == 2 and elementwise.can_use(logits)


def draw(logits: Tensor, temperature: np.ndarray, greedy: np.ndarray, uniform: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [R] of softmax(logits / temperature) and their logprobs float32 [R], NaN where logits are
    not finite.

    Args:
        logits: [R, V] with V at least 1, where `can_use`.
        temperature: float64 [R], > 0.
        greedy: bool [R]; the most likely token of these rows.
        uniform: float64 [R] in [0, 1): where in the cumulative distribution the others' tokens are.
    """
    functions, (rows, vocab) = kernels(), logits.shape
    assert functions is not None and temperature.shape == greedy.shape == uniform.shape == (rows,)
    given = [np.ascontiguousarray(x, dtype) for x, dtype in ((temperature, float), (greedy, bool), (uniform, float))]
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    threads = min(rows, torch.get_num_threads()) if logits.numel() >= elementwise.PARALLEL else 1
    pointers = *(x.data_ptr() for x in (tokens, logprobs, logits)), *(x.ctypes.data for x in given)
    functions["draw"](*pointers, rows, vocab, logits.stride(0), threads)
    return tokens, logprobs
