"""C kernel for paged attention with one query per sequence, in float32 on a CPU.

It reads keys and values once, in place: two to three times as fast as batched matmuls over pages (`page_batches`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.decode.paged_cache import PagedTensors
from archon.models.attention.spec import AttentionSpec
from archon.models.cpu.library import kernel, kernels


def can_use(q: Tensor, paged: PagedTensors) -> bool:
    """Return whether the kernel supports queries [B, H, K]: float32 on a CPU, without a gradient.

    It also needs at least as many sequences times key heads as threads.
    """
    return (
        type(q) is type(paged.keys) is Tensor
        and q.device.type == "cpu"
        and q.dtype == paged.keys.dtype == torch.float32
        and not (q.requires_grad and torch.is_grad_enabled())
        and q.shape[0] * paged.rows.heads >= torch.get_num_threads()
        and kernels() is not None
    )


def attend(q: Tensor, paged: PagedTensors, pages: np.ndarray, lengths: np.ndarray, spec: AttentionSpec) -> Tensor:
    """Return attention [B, H, V] of one query [B, H, K] per sequence to its pages in one layer.

    Args:
        q: queries, accepted by `can_use`.
        paged: keys and values of the layer, accepted by `can_use`.
        pages: int64 [B, width], the pages of each sequence, in order.
        lengths: int64 [B], tokens of each sequence, at least 1.
        spec: the layer's attention options.
    """
    rows, page_size, q = paged.rows, paged.keys.shape[-2], q.contiguous()
    out = q.new_empty(*q.shape[:2], rows.value_features)
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    assert sinks is None or sinks.numel() == q.shape[1]
    assert pages.shape[1] * page_size >= lengths.max()
    pages, lengths = np.ascontiguousarray(pages, dtype=np.int64), np.ascontiguousarray(lengths, dtype=np.int64)
    tensors = [x.data_ptr() for x in (out, q, paged.keys, paged.values)]
    arrays = pages.ctypes.data, lengths.ctypes.data, None if sinks is None else sinks.data_ptr()
    sizes = *q.shape[:2], rows.heads, rows.key_features, rows.value_features
    strides = paged.keys.stride(-2), paged.values.stride(-2), page_size, pages.shape[1]
    options = spec.window or 0, spec.scale, spec.soft_cap or 0.0, torch.get_num_threads()
    if kernel("decode_attention")(*tensors, *arrays, *sizes, *strides, *options):
        raise MemoryError("attention to pages: out of memory")
    return out
