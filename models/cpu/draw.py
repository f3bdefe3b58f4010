"""C kernel that samples tokens from logits, in float32 on a CPU.

It is one call and two passes over the logits; PyTorch needs twenty calls and ten passes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from archon.models.cpu import elementwise
from archon.models.cpu.library import kernel


def can_use(logits: Tensor) -> bool:
    """Return whether the kernel supports logits [R, V]: float32 on a CPU."""
    return logits.ndim == 2 and elementwise.can_use(logits)


def draw(logits: Tensor, temperature: np.ndarray, greedy: np.ndarray, uniform: np.ndarray) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature).

    Args:
        logits: [R, V] with V at least 1, accepted by `can_use`.
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
    threads = min(rows, torch.get_num_threads()) if logits.numel() >= elementwise.PARALLEL else 1
    pointers = *(x.data_ptr() for x in (tokens, logprobs, logits)), *(x.ctypes.data for x in inputs)
    kernel("draw")(*pointers, rows, vocab, logits.stride(0), threads)
    return tokens, logprobs
