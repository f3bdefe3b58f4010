"""Compile Triton kernels without a GPU: Triton includes ptxas, and only a launch needs the device.

TRITON_INTERPRET=0 python -m tests.models.cuda.ahead_of_time 90    # an H100
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class AbsentGPU:
    """The driver of a GPU of one compute capability, such as 90, as far as the compiler asks for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached for each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compile_only(capability: int) -> Iterator[dict[str, set[int]]]:
    """Compile every kernel launched inside this context, without running it.

    Yields:
        The bytes of shared memory of each kernel's variants.
    """
    shared: dict[str, set[int]] = {}
    run = JITFunction.run

    def compile_kernel(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, **(kwargs | {"warmup": True}))
        assert compiled.asm["cubin"]
        shared.setdefault(kernel.__name__, set()).add(compiled.metadata.shared)
        return compiled

    triton.runtime.driver.set_active(AbsentGPU(capability))
    with mock.patch.object(JITFunction, "run", compile_kernel):
        yield shared


def head() -> None:
    """The head's kernels on rows of Qwen3's vocabulary: for SFT, and with every option of RL."""
    from archon.models.cuda import head

    rows, vocab = 4, 151_936
    labels, sums = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    for dtype, scales, soft_cap, entropy in ((torch.bfloat16, None, None, None), (torch.float32, sums, 30.0, sums)):
        logits = torch.zeros(rows, vocab, dtype=dtype)
        head.head_loss(logits, labels, 1.0, scales, soft_cap, sums, sums.clone(), sums)
        head.head_sums(logits, labels, 1.0, scales, soft_cap, sums, sums.clone(), entropy)
        head.head_gradient(logits, labels, 1.0, scales, soft_cap, sums, entropy, sums, entropy)


def paged_attention() -> None:
    """Pages of Qwen3, gpt-oss (sinks, window), Gemma 2 (soft cap) and DeepSeek-V3 (latents)."""
    from archon.models.attention.decode.cache import PagedRows
    from archon.models.attention.decode.paged_cache import PagedCache
    from archon.models.attention.spec import AttentionSpec
    from archon.models.cuda.paged_attention import paged_attention, store_tokens

    models: list[tuple[int, PagedRows, dict[str, Any]]] = [
        (16, PagedRows(8, 128, 128), {}),
        (64, PagedRows(8, 64, 64), {"window": 128, "sinks": torch.zeros(64)}),
        (16, PagedRows(8, 256, 256), {"window": 1024, "soft_cap": 50.0}),
        (128, PagedRows(1, 576, 512, values_in_keys=True), {}),
    ]
    pages, lengths = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    for (heads, rows, options), dtype in product(models, (torch.bfloat16, torch.float32)):
        paged = next(iter(PagedCache([rows], 4, 32, dtype, "cpu").layers.values()))
        q = torch.zeros(2, heads, rows.key_features, dtype=dtype)
        v = None if rows.values_in_keys else q[:, : rows.heads, : rows.value_features]
        store_tokens(paged, pages, lengths, q[:, : rows.heads], v)
        for n_splits in (1, 2):
            paged_attention(q, paged, pages, lengths, AttentionSpec(0.1, **options), n_splits)


def elementwise() -> None:
    """Norms, rotations and SwiGLU: heads of Qwen3, hidden states of Qwen3-14B, and gpt-oss's clamped SwiGLU."""
    from archon.models.cuda.elementwise import norm_and_rotate, swiglu, swiglu_backward

    for dtype in (torch.bfloat16, torch.float32):
        heads, hidden = torch.zeros(4, 16, 128, dtype=dtype), torch.zeros(4, 1, 5120, dtype=dtype)
        cos = torch.zeros(4, 1, 64)
        for interleaved in (False, True):
            norm_and_rotate(heads, torch.zeros(128, dtype=dtype), cos, cos, 1e-6, 0.0, False, interleaved)
        norm_and_rotate(heads, None, cos[..., :32].to(dtype), cos[..., :32].to(dtype), 1e-6, 0.0, True, False)
        norm_and_rotate(hidden, torch.zeros(5120, dtype=dtype), None, None, 1e-6, 1.0, True, False)
        for alpha, limit in ((None, 0.0), (1.702, 7.0)):
            swiglu(hidden[:, 0], hidden[:, 0], alpha, limit)
            swiglu_backward(hidden[:, 0], hidden[:, 0], hidden[:, 0], alpha, limit)


def experts() -> None:
    """128 experts of width 2048, 8 for each token, as in Qwen3-30B-A3B; biases of gpt-oss."""
    from archon.models.cuda import experts as kernels

    chosen, p = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 128)
    kernels.group_rows(chosen, 128)
    positions, ends = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        x, rows = torch.zeros(4, 2048, dtype=dtype), torch.zeros(32, 2048, dtype=dtype)
        weights, bias = torch.zeros(4, 8, dtype=dtype), torch.zeros(128, 2048)
        kernels.gather_rows(x, positions)
        for row_weights in (None, weights):
            kernels.sum_rows(rows, row_weights, positions)
        kernels.sum_rows_backward(x, rows, weights, positions)
        for counts in (None, torch.ones(4, dtype=torch.int64)):
            _, sums = kernels.route(p, chosen, counts, True, 1e-20, 1.0, dtype)
            kernels.route_backward(weights, torch.zeros_like(sums), p, chosen, counts, True, 1e-20, 1.0)
        kernels.add_bias(rows, bias, ends)
        kernels.add_bias_backward(rows, bias, ends)


def prefixes() -> None:
    """Contexts of shared prefixes with the heads of Qwen3, and with sinks."""
    from archon.models.attention.prefix.cascade import Part
    from archon.models.cuda import prefixes as kernels

    part = Part.from_spans([[(3, 2)], [(5, 2)]], [[(0, 3)], [(0, 1), (7, 2)]], 12, torch.device("cpu"))
    keys = part.key_rows, part.key_starts, part.key_positions
    for dtype in (torch.bfloat16, torch.float32):
        q, k = torch.zeros(12, 16, 128, dtype=dtype), torch.zeros(12, 8, 128, dtype=dtype)
        lse = torch.zeros(16, 12)
        for results in ([], [q, q, lse]):
            kernels.select_context(q, k, k, part.query_rows, part.key_rows, results)
        queries = len(part.query_rows)
        context = torch.zeros(queries, 16, 128, dtype=dtype), torch.zeros(16, queries)
        for sinks in (None, torch.zeros(16, dtype=dtype)):
            kernels.merge_context(q, lse, *context, part.query_slots, sinks)
        selected = torch.zeros(len(part.key_rows), 8, 128, dtype=dtype)
        context_grads = [context[0], selected, selected]
        kernels.add_context_grads(q, k, k.clone(), context_grads, part.query_slots, *keys[1:])
        kernels.select_keys(k, k, *keys)
        kernels.sum_keys(selected, selected, *keys[1:])


KERNELS = (head, paged_attention, elementwise, experts, prefixes)

if __name__ == "__main__":
    with compile_only(int(sys.argv[1])) as compiled:
        for launch in KERNELS:
            launch()
    print(json.dumps({name: sorted(sizes) for name, sizes in compiled.items()}))
