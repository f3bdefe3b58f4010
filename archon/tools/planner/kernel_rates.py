"""Measurement of each kind of kernel in a training step, with archon's modules in sizes of real models.

On a GPU all measurements take less than a minute. They run on a CPU too, in small sizes, for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.packed.documents import PackedDocuments, cu_seqlens_from_lengths
from archon.models.attention.registry import backends_on
from archon.models.attention.spec import AttentionSpec
from archon.models.layers.matmul import grouped_linear, grouped_weight_gradient
from archon.models.layers.token_scores import weighted_loss
from archon.tools.planner.hardware import AttentionRate
from archon.tools.planner.time_model import ATTENTION_FLOPS

ROUNDS = 7


class KernelSizes(NamedTuple):
    """Sizes of the measured kernels.

    Attributes:
        tokens: tokens of matmuls, attention and head.
        matrices: (in, out) features of a block's matrices.
        experts: number of experts, and the features in and out of one; each token chooses eight.
        heads: query heads, key heads and features of a head.
        lengths: document lengths of two measurements of attention.
        head: features and vocabulary of the head.
        launches: tiny kernels in a row.
    """

    tokens: int
    matrices: tuple[tuple[int, int], ...]
    experts: tuple[int, int, int]
    heads: tuple[int, int, int]
    lengths: tuple[int, int]
    head: tuple[int, int]
    launches: int


# Matrices of Qwen3-0.6B, 1.7B and 8B, experts of Qwen3-30B-A3B, attention and head of Qwen3-0.6B.
GPU_SIZES = KernelSizes(
    32768,
    ((1024, 3072), (2048, 6144), (4096, 12288)),
    (128, 2048, 768),
    (16, 8, 128),
    (4096, 32768),
    (1024, 151936),
    1000,
)
TINY_SIZES = KernelSizes(64, ((32, 48),), (4, 32, 16), (4, 2, 16), (8, 64), (32, 128), 10)


def median_seconds(work: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median seconds of `rounds` calls of `work` after one warm-up call."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def measure_matmuls(device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> float:
    """Return FLOP/s of a block's matmuls: forward, input gradient and weight gradient of each matrix."""
    flops = seconds = 0.0
    for width, out in sizes.matrices:
        shapes = ((sizes.tokens, width), (out, width), (sizes.tokens, out))
        x, weight, grad = (_random(*shape, like=(device, dtype)) for shape in shapes)
        products = ((x, weight.t()), (grad, weight), (grad.t(), x))
        flops += 6 * sizes.tokens * width * out
        seconds += sum(median_seconds(partial(torch.mm, *operands), device) for operands in products)
    return flops / seconds


def measure_experts(device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> float:
    """Return FLOP/s of grouped matmuls with an even load: forward, input gradient and weight gradient."""
    experts, width, out = sizes.experts
    rows = 8 * sizes.tokens // experts * experts
    x, grad = (_random(rows, features, like=(device, dtype)) for features in (width, out))
    weight, back = (_random(experts, *shape, like=(device, dtype)) for shape in ((out, width), (width, out)))
    counts = torch.full((experts,), rows // experts, device=device)

    def work() -> None:
        grouped_linear(x, weight, counts)
        grouped_linear(grad, back, counts)
        grouped_weight_gradient(grad, x, counts)

    return 6 * rows * width * out / median_seconds(work, device)


def measure_fp8_matmuls(device: torch.device, sizes: KernelSizes) -> float:
    """Return FLOP/s of FP8 matmuls with one scale per operand, without the quantization."""
    flops = seconds = 0.0
    scale, scaling = torch.ones((), device=device), F.ScalingType.TensorWise
    multiply = partial(F.scaled_mm, output_dtype=torch.bfloat16, use_fast_accum=True)
    for width, out in sizes.matrices:
        shapes = ((sizes.tokens, width), (out, width))
        x, weight = (_random(*shape, like=(device, torch.float32)).to(torch.float8_e4m3fn) for shape in shapes)
        flops += 2 * sizes.tokens * width * out
        operands = (x, weight.t(), scale, scaling, scale, scaling)
        seconds += median_seconds(partial(multiply, *operands), device)
    return flops / seconds


def measure_attention(device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> dict[str, AttentionRate]:
    """Return the rate of each attention backend that runs here, forward and backward, from two document lengths."""
    rates = {}
    for backend in backends_on(device, dtype):
        points = [(length / 2, _attention_flops(backend, length, device, dtype, sizes)) for length in sizes.lengths]
        rates[backend.name] = fit_attention_rate(*points)
    return rates


def fit_attention_rate(few: tuple[float, float], many: tuple[float, float]) -> AttentionRate:
    """Return the rate through two points (mean attended keys of a query, FLOP/s)."""
    (few_keys, slow), (many_keys, fast) = few, many
    half_keys = max(0.0, fast - slow) / max(slow / few_keys - fast / many_keys, 1e-9)
    return AttentionRate(flops=max(slow, fast) * (1 + half_keys / many_keys), half_keys=half_keys)


def _attention_flops(
    backend: AttentionBackend, length: int, device: torch.device, dtype: torch.dtype, sizes: KernelSizes
) -> float:
    heads, kv_heads, features = sizes.heads
    lengths = (length,) * (sizes.tokens // length)
    documents = PackedDocuments(cu_seqlens_from_lengths(lengths, device), length, lengths)
    backend.prepare_packed(documents)
    shapes = [(sizes.tokens, n, features) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (_random(*shape, like=(device, dtype)).requires_grad_() for shape in shapes)
    grad, spec = torch.ones_like(q), AttentionSpec(features**-0.5)
    seconds = median_seconds(lambda: backend.attend_packed(q, k, v, documents, spec).backward(grad), device)
    return ATTENTION_FLOPS * heads * features * (length / 2) * sizes.tokens / seconds


def measure_head_passes(
    device: torch.device, dtype: torch.dtype, sizes: KernelSizes, matmul_flops: float, bandwidth: float
) -> float:
    """Return the passes over the logits that the head makes in addition to its matmuls, at these rates."""
    width, vocab = sizes.head
    hidden, weight = (_random(rows, width, like=(device, dtype)).requires_grad_() for rows in (sizes.tokens, vocab))
    labels, weights = torch.arange(sizes.tokens, device=device) % vocab, torch.ones(sizes.tokens, device=device)
    seconds = median_seconds(lambda: weighted_loss(hidden, weight, labels, weights)[0].backward(), device)
    logits = sizes.tokens * vocab * hidden.element_size()
    return max(0.0, seconds - 6 * sizes.tokens * width * vocab / matmul_flops) * bandwidth / logits


def measure_launch(device: torch.device, sizes: KernelSizes) -> float:
    """Return the seconds between two kernels, measured on a sequence of tiny kernels."""
    x = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(sizes.launches):
            x.add_(1)

    return median_seconds(work, device) / sizes.launches


def _random(*shape: int, like: tuple[torch.device, torch.dtype]) -> Tensor:
    device, dtype = like
    return torch.randn(shape, device=device).to(dtype)
