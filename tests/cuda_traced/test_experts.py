"""Launches of a layer of experts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.models.layers.moe import ExpertsLayer, MoE
from tests.cuda_traced.stand_ins import one_gpu
from tests.cuda_traced.trace import CUDA, cuda_trace, run_backward

pytestmark = pytest.mark.cuda_traced

QWEN3 = ExpertsLayer(16, 4, 32, normalize=True)
GPT_OSS = ExpertsLayer(16, 4, 32, ClampedSwiGLU(), normalize=True, router_bias=True, expert_biases=True)
# An operator of two kernels and a running sum.
SORT = 3


@pytest.mark.parametrize(
    ("spec", "shares_prefixes", "before", "launches"),
    # Without kernels of experts, and with them; 12 are matmuls. A sort counted as one launch before.
    [(QWEN3, False, 70, 32), (QWEN3, True, 72, 32), (GPT_OSS, False, 110, 42)],
    ids=["Qwen3", "Qwen3 with shared prefixes", "gpt-oss"],
)
def test_launches(
    traced: Callable[..., None], spec: ExpertsLayer, shares_prefixes: bool, before: int, launches: int
) -> None:
    traced("", "", f"experts: {launches} launches forward and backward; {before} without kernels")
    with one_gpu(), cuda_trace() as trace:
        with torch.device("meta"):
            moe = MoE(64, spec).to(torch.bfloat16)
        moe.to_empty(device=CUDA)
        x = torch.empty(48, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        counts = torch.ones(48, device=CUDA, dtype=torch.int64) if shares_prefixes else None
        trace.launches = 0
        out, _ = moe(x, counts)
        grads = run_backward(out, torch.empty_like(out))
    assert grads.keys() == {x, *moe.parameters()}
    assert not trace.waits
    assert trace.launches - 1 + SORT <= launches
