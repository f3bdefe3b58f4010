"""Attention along the paths of trees, in float32 on a CPU, by C functions.

A token of a short answer sees a dozen others: products of padded trees and the masks of what each token sees cost
twice what these few sums do. From paths of forty tokens on products are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.attention.spec import AttentionSpec
from archon.models.native import elementwise
from archon.models.native.library import kernels

LONGEST = 32
"""The tokens of the longest path that the functions are used for."""


class Routes:
    """The paths of N trees of U tokens, which are numbered one tree after another.

    Args:
        trees: of each tree the path of each of its tokens: from the root to the token, which is last, by their numbers
            in the tree.

    Attributes:
        paths: int64 [P], all paths one after another.
        starts: int64 [U + 1], where each begins.
        trees: int64 [N + 1], the first token of each tree.
        longest: the tokens of the longest path.
    """

    def __init__(self, trees: Sequence[list[list[int]]]) -> None:
        self.trees = np.cumsum([0, *map(len, trees)], dtype=np.int64)
        lengths = np.array([len(path) for tree in trees for path in tree], dtype=np.int64)
        within = np.array([token for tree in trees for path in tree for token in path], dtype=np.int64)
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        self.paths = within + self.trees[:-1].repeat(self.starts[self.trees[1:]] - self.starts[self.trees[:-1]])
        self.longest = int(lengths.max())


def applies(q: Tensor, k: Tensor, v: Tensor, routes: Routes, spec: AttentionSpec) -> bool:
    """Returns whether the functions compute attention on these paths: on short ones, without sinks and a soft cap."""
    plain = spec.sinks is None and spec.soft_cap is None
    return plain and routes.longest <= LONGEST and elementwise.applies(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, routes: Routes, spec: AttentionSpec) -> Tensor:
    """Returns `tree_attention`, where `applies`; differentiable."""
    return _TreeAttention.apply(q, k, v, routes, spec.scale, spec.window or 0)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, routes: Routes, scale: float, window: int) -> Tensor:
        functions = kernels()
        assert functions is not None and len(q) == len(k) == len(v) == routes.trees[-1] and q.shape[1] % k.shape[1] == 0
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
        sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2], window
        pointers = [x.data_ptr() for x in (out, lse, q, k, v)]
        threads = torch.get_num_threads()
        if functions["tree_attention"](*pointers, *_places(routes), routes.longest, *sizes, scale, threads):
            raise MemoryError("attention along the paths of trees: out of memory")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.routes, ctx.sizes, ctx.scale = routes, sizes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        functions, (q, k, v, out, lse) = kernels(), ctx.saved_tensors
        assert functions is not None
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad = grad.contiguous()
        pointers = [x.data_ptr() for x in (*grads, grad, out, lse, q, k, v)]
        functions["tree_attention_backward"](
            *pointers, *_places(ctx.routes), *ctx.sizes, ctx.scale, torch.get_num_threads()
        )
        return *grads, None, None, None


def _places(routes: Routes) -> list[int]:
    return [*(x.ctypes.data for x in (routes.paths, routes.starts, routes.trees)), len(routes.trees) - 1]
