"""Every family with every attention backend: logits, token scores and fused losses of packed documents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from archon.models.base import BaseArchonModel
from archon.models.layers.head import TokenScores, WeightedLoss
from archon.models.spec import FAMILIES
from archon.tools.check.random_configs import ROPE_KINDS
from tests.cuda_traced.models import LENGTHS, VOCAB, Pack, build, family_config, on_device
from tests.cuda_traced.stand_ins import flash_attention_4, triton_without_launches
from tests.cuda_traced.trace import CudaTrace, cuda_trace, require_on_cuda

pytestmark = pytest.mark.cuda_traced

BACKENDS = ("fa4", "varlen", "flash", "sdpa")
KERNELS = {
    "fa4": "archon.flash_attention.default",
    "varlen": "torch_attn._varlen_attn.default",
    "flash": "flash_attn._flash_attn_varlen_forward.default",
}
T = sum(LENGTHS)


def check_forwards(model: BaseArchonModel, pack: Pack, **inputs: Any) -> None:
    """Run the three kinds of forward, and check what they return."""
    labels, rows, weights = on_device(torch.arange(T) % VOCAB, torch.arange(T - 7), torch.ones(T))
    logits = pack.run(model, **inputs)
    scores = pack.run(model, labels=labels, label_rows=rows, **inputs)
    loss = pack.run(model, labels=labels, label_rows=rows, loss_weights=weights, **inputs)
    assert isinstance(scores, TokenScores) and isinstance(loss, WeightedLoss)
    require_on_cuda((logits, scores, loss, model.router_stats))
    assert (logits.shape, logits.dtype) == ((T, VOCAB), torch.bfloat16)
    assert scores.entropy is not None
    assert {(x.shape, x.dtype) for x in (*scores, loss.logprobs)} == {((T,), torch.float32)}
    assert (loss.loss.shape, loss.loss.dtype) == ((), torch.float32) and loss.loss.requires_grad


def trace_forwards(config: dict[str, Any], backend: str, **args: Any) -> CudaTrace:
    with cuda_trace() as trace:
        model, pack = build(config, backend, **args), Pack(backend)
        trace.waits.clear()
        check_forwards(model, pack)
    return trace


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward(traced: Callable[..., None], family: str, backend: str) -> None:
    traced(family, backend, "logits, token scores, fused loss")
    with flash_attention_4() if backend == "fa4" else nullcontext():
        trace = trace_forwards(family_config(family), backend)
    assert trace.waits == {}
    assert trace.operators["archon.head_sums.default"] == trace.operators["archon.head_loss.default"] == 1
    if backend in KERNELS:
        assert trace.operators[KERNELS[backend]]


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_positions(traced: Callable[..., None], kind: str) -> None:
    traced("llama", "varlen", f"RoPE {kind}")
    assert trace_forwards(family_config("llama", rope_kind=kind), "varlen").waits == {}


def test_delta_net_with_fla(traced: Callable[..., None]) -> None:
    """fla's own code but for its kernels, which are not launched."""
    traced("qwen3_5_text", "fla", "logits, token scores, fused loss")
    with triton_without_launches() as launched:
        trace = trace_forwards(family_config("qwen3_5_text"), "varlen", delta_rule="fla")
    assert launched
    assert trace.waits == {"archon.models.layers.delta_rule._fla_delta_rule": 3}  # once in each of three forwards


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float16, "varlen"), (torch.float32, "sdpa")])
def test_other_dtypes(traced: Callable[..., None], dtype: torch.dtype, backend: str) -> None:
    """`auto` chooses by the dtype."""
    traced("qwen3", "auto", f"logits in {str(dtype).removeprefix('torch.')}")
    with cuda_trace() as trace:
        model, pack = build(family_config("qwen3"), "auto", dtype), Pack("auto")
        trace.waits.clear()
        logits = pack.run(model)
        require_on_cuda(logits)
    assert logits.dtype == dtype and trace.waits == {}
    assert bool(trace.operators[KERNELS["varlen"]]) == (backend == "varlen")
