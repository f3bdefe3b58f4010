"""Compile Triton kernels for a GPU that is not there: Triton brings ptxas, and only a launch needs the device.

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
    """Compile every kernel that is launched inside, and run none.

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
    """A decode step's norms and rotations: heads of Qwen3, and a whole row of its hidden states; SwiGLU."""
    from archon.models.cuda.elementwise import norm_and_rotate, swiglu

    for dtype in (torch.bfloat16, torch.float32):
        heads, hidden = torch.zeros(4, 16, 128, dtype=dtype), torch.zeros(4, 1, 1024, dtype=dtype)
        cos = torch.zeros(4, 1, 64)
        for interleaved in (False, True):
            norm_and_rotate(heads, torch.zeros(128, dtype=dtype), cos, cos, 1e-6, 0.0, False, interleaved)
        norm_and_rotate(heads, None, cos[..., :32], cos[..., :32], 1e-6, 0.0, True, False)
        norm_and_rotate(hidden, torch.zeros(1024, dtype=dtype), None, None, 1e-6, 1.0, True, False)
        swiglu(torch.zeros(4, 3072, dtype=dtype), torch.zeros(4, 3072, dtype=dtype))


KERNELS = (head, paged_attention, elementwise)

if __name__ == "__main__":
    with compile_only(int(sys.argv[1])) as compiled:
        for launch in KERNELS:
            launch()
    print(json.dumps({name: sorted(sizes) for name, sizes in compiled.items()}))
