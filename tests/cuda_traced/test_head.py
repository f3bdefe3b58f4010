"""Launches of the head on CUDA for each tile of rows, and its kernel compiled for GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from archon.models.layers import logit_tiles
from archon.models.layers.head import LMHead
from archon.models.layers.logit_tiles import HeadOperands, KernelTiles, LogitOptions
from tests.cuda_traced.trace import CUDA, cuda_trace

pytestmark = pytest.mark.cuda_traced

ROWS, DIM, VOCAB = 40, 64, 128
TILE_ROWS = 8
NOT_LAUNCHED = {"aten.slice.Tensor", "aten.t.default", "aten.detach.default", "prim.device.default"}
SUMS, GRADIENT, LOSS = (f"archon.{name}.default" for name in ("head_sums", "head_gradient", "head_loss"))
# The gradients of hidden states and of the weight.
MATMULS = Counter({"aten.mm.out": 1, "aten.addmm.dtype_out": 1})
LOGITS = Counter({"aten.mm.out": 1})


def weighted_loss(head: LMHead, hidden: Tensor, labels: Tensor) -> None:
    temperature, weights = torch.ones(2, len(labels), device=CUDA)
    head(hidden, labels, temperature, weights=weights, rows=torch.arange(len(labels), device=CUDA))


def scores(head: LMHead, hidden: Tensor, labels: Tensor) -> None:
    temperature = torch.ones(len(labels), device=CUDA)
    head(hidden, labels, temperature, rows=torch.arange(len(labels), device=CUDA))


def gradients_of_scores(head: LMHead, hidden: Tensor, labels: Tensor) -> None:
    """Without autograd: a backward pass needs a device."""
    inv_temperature = torch.ones(len(labels), 1, device=CUDA)
    tiles = KernelTiles(HeadOperands(hidden, head.weight), labels, LogitOptions(inv_temperature, 30.0, None))
    with torch.no_grad():
        tiles.gradients((True, True, False, False), *torch.ones(4, len(labels), 1, device=CUDA))


def launches(run: Callable[..., None], rows: int, dtype: torch.dtype) -> Counter[str]:
    with cuda_trace() as trace:
        with torch.device("meta"):
            head = LMHead(DIM, VOCAB, soft_cap=30.0).to(dtype)
        head.to_empty(device=CUDA)
        hidden = torch.zeros(rows, DIM, device=CUDA, dtype=dtype, requires_grad=True)
        labels = torch.zeros(rows, device=CUDA, dtype=torch.int64)
        trace.operators.clear()
        run(head, hidden, labels)
    assert trace.waits == {}
    return Counter({name: count for name, count in trace.operators.items() if name not in NOT_LAUNCHED})


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (weighted_loss, LOGITS + Counter([LOSS]) + MATMULS),
        (scores, LOGITS + Counter([SUMS])),
        (gradients_of_scores, LOGITS + Counter([GRADIENT]) + MATMULS),
    ],
    ids=["weighted loss", "scores", "gradients of scores"],
)
def test_launches_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, traced: Callable[..., None], run: Callable[..., None], expected: Counter[str]
) -> None:
    traced("", "", f"head: {expected.total()} launches a tile, {run.__name__.replace('_', ' ')}")
    monkeypatch.setattr(logit_tiles, "KERNEL_ROWS", (TILE_ROWS, TILE_ROWS))
    monkeypatch.setattr(logit_tiles, "_device_memory", lambda device: 0)
    two, five = (launches(run, n * TILE_ROWS, torch.bfloat16) for n in (2, 5))
    assert five - two == Counter({name: 3 * count for name, count in expected.items()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_use_no_kernel(traced: Callable[..., None], dtype: torch.dtype) -> None:
    traced("", "", f"head: {str(dtype).removeprefix('torch.')} without its kernel")
    assert not any(name.startswith("archon.") for name in launches(weighted_loss, ROWS, dtype))
