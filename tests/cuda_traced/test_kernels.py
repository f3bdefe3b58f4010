"""Triton kernels of the decode step, compiled for GPUs with the arguments of their launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.spec import AttentionSpec

pytestmark = pytest.mark.cuda_traced

# Bytes of shared memory that a program can have.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}


def compile_launches(run: Callable[[], Any], capability: int) -> list[Any]:
    """Return the kernels that a function launches on tensors on the CPU, compiled and not run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import KernelInterface

    kernels = []

    def launch(kernel: Any, grid: Any) -> Any:
        def compile_(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
            values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
            types = {name: _type(value) for name, value in values.items()} | dict.fromkeys(constants, "constexpr")
            source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
            kernels.append(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options))

        return compile_

    with mock.patch.object(KernelInterface, "__getitem__", launch):
        run()
    return kernels


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (89, torch.bfloat16),  # the least shared memory
        (90, torch.bfloat16),
        *(pytest.param(other, torch.bfloat16, marks=pytest.mark.slow) for other in (80, 100)),
        *(pytest.param(other, torch.float32, marks=pytest.mark.slow) for other in SHARED_MEMORY),
    ],
)
@pytest.mark.parametrize(
    ("heads", "rows", "options"),
    [
        (16, PagedRows(8, 128, 128), {}),
        (64, PagedRows(8, 64, 64), {"window": 128, "sinks": torch.zeros(64)}),
        (16, PagedRows(8, 256, 256), {"window": 1024, "soft_cap": 50.0}),
        (128, PagedRows(1, 576, 512, values_in_keys=True), {}),
    ],
    ids=["Qwen3-0.6B", "gpt-oss", "Gemma 2", "DeepSeek-V3"],
)
def test_paged_attention_compiles(
    traced: Callable[..., None],
    heads: int,
    rows: PagedRows,
    options: dict[str, Any],
    dtype: torch.dtype,
    capability: int,
) -> None:
    from archon.models.cuda.paged_attention import paged_attention, store_tokens

    traced("", "", f"paged attention compiled for sm_{capability}, {rows}, {dtype}")
    paged = PagedCache([rows], 4, 32, dtype, "cpu").layers[0]
    q, pages = torch.zeros(2, heads, rows.key_features, dtype=dtype), torch.zeros(2, 2, dtype=torch.int64)
    for n_splits in (1, 2):
        lengths = torch.ones(2, dtype=torch.int64)
        attend = partial(paged_attention, q, paged, pages, lengths, AttentionSpec(0.1, **options), n_splits)
        stored = q[:, : rows.heads], None if rows.values_in_keys else q[:, : rows.heads, : rows.value_features]
        store = partial(store_tokens, paged, pages, lengths, *stored)
        for kernel in compile_launches(lambda: (store(), attend()), capability):  # noqa: B023
            assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elementwise_kernels_compile(traced: Callable[..., None], dtype: torch.dtype, capability: int) -> None:
    from archon.models.cuda.elementwise import norm_and_rotate, swiglu

    traced("", "", f"norm, rotation and SwiGLU compiled for sm_{capability}, {dtype}")
    x, angles = torch.zeros(2, 16, 128, dtype=dtype), torch.zeros(2, 1, 32)
    hidden = torch.zeros(2, 1, 5120, dtype=dtype)

    def run() -> None:
        norm_and_rotate(x, x[0, 0], angles, angles, 1e-6, 0.0, False, False)
        norm_and_rotate(x, None, angles.to(dtype), angles.to(dtype), 0.0, 0.0, False, True)
        norm_and_rotate(hidden, hidden[0, 0], None, None, 1e-6, 1.0, False, False)
        swiglu(hidden[:, 0], hidden[:, 0])

    assert all(kernel.asm["cubin"] for kernel in compile_launches(run, capability))
