"""C kernels for attention along tree paths and in short documents, in float32 on a CPU.

A token of a short answer attends to a dozen others. Matmuls over padded trees and their masks cost twice as much as
these few sums, and one call per document length costs more. From paths of forty tokens on matmuls are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.attention.spans import bounds, ranges
from archon.models.attention.spec import AttentionSpec
from archon.models.cpu import operations
from archon.models.cpu.library import kernel

LONGEST = 32
"""Maximum tokens of a path for these kernels."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Paths of N trees with U tokens, which are numbered one tree after another.

    Attributes:
        paths: int64 [P], all paths one after another, each from the root of its tree to its token.
        starts: int64 [U + 1], start of each path.
        trees: int64 [N + 1], first token of each tree.
        longest: tokens of the longest path.
    """

    paths: np.ndarray
    starts: np.ndarray
    trees: np.ndarray
    longest: int

    @classmethod
    def from_trees(cls, trees: Sequence[list[list[int]]]) -> Routes:
        """Return the routes of trees; a tree lists the path of each of its tokens."""
        firsts = bounds(np.array([len(tree) for tree in trees], dtype=np.int64))
        lengths = np.array([len(path) for tree in trees for path in tree], dtype=np.int64)
        within = np.array([token for tree in trees for path in tree for token in path], dtype=np.int64)
        starts = bounds(lengths)
        return cls(
            within + firsts[:-1].repeat(starts[firsts[1:]] - starts[firsts[:-1]]), starts, firsts, int(lengths.max())
        )

    @classmethod
    def from_documents(cls, lengths: Sequence[int]) -> Routes:
        """Return the routes of documents of these lengths; each token attends to the tokens before it."""
        documents = np.array(lengths, dtype=np.int64)
        firsts = bounds(documents)
        first = firsts[:-1].repeat(documents)  # of each token's document
        seen = np.arange(len(first)) - first + 1
        return cls(ranges(first, seen), bounds(seen), firsts, int(documents.max(initial=1)))


def can_use(q: Tensor, k: Tensor, v: Tensor, longest: int, spec: AttentionSpec) -> bool:
    """Return whether the kernels support causal attention on paths of at most `longest` tokens.

    They support short paths, a window, no sinks and no soft cap.
    """
    plain = spec.causal and spec.sinks is None and spec.soft_cap is None
    return plain and longest <= LONGEST and operations.can_use(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, routes: Routes, spec: AttentionSpec) -> Tensor:
    """Return `tree_attention` for arguments that `can_use` accepts; differentiable."""
    return _TreeAttention.apply(q, k, v, routes, spec.scale, spec.window or 0)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, routes: Routes, scale: float, window: int) -> Tensor:
        assert len(q) == len(k) == len(v) == routes.trees[-1] and q.shape[1] % k.shape[1] == 0
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
        sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2], window
        pointers = [x.data_ptr() for x in (out, lse, q, k, v)]
        threads = torch.get_num_threads()
        if kernel("tree_attention")(*pointers, *_places(routes), routes.longest, *sizes, scale, threads):
            raise MemoryError("attention in trees or short documents: out of memory")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.routes, ctx.sizes, ctx.scale = routes, sizes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad = grad.contiguous()
        pointers = [x.data_ptr() for x in (*grads, grad, out, lse, q, k, v)]
        sizes = *_places(ctx.routes), *ctx.sizes
        kernel("tree_attention_backward")(*pointers, *sizes, ctx.scale, torch.get_num_threads())
        return *grads, None, None, None


def _places(routes: Routes) -> list[int]:
    return [*(x.ctypes.data for x in (routes.paths, routes.starts, routes.trees)), len(routes.trees) - 1]
