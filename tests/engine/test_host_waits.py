"""From the first forward of a step to its end the host waits for the device once, to read norm and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from archon.engine import train_step
from archon.engine.loss import CrossEntropyLoss, Metrics, loss_token_count
from archon.engine.plan import ForwardPlanner
from tests.engine.tiny import make_engine, sft_batch

aten = torch.ops.aten
# What gives the host a number, or a shape, that only the device knows.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.repeat_interleave}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Waits(TorchDispatchMode):
    """Notes the operators after which a host has to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or by_mask:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def scored(logprobs: Tensor, entropy: Tensor | None, mb: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """A loss of token scores, entropies included."""
    assert entropy is not None
    mask = mb["loss_mask"]
    return -((logprobs + 0.1 * entropy) * mask).sum(), {"entropy": (entropy.sum(), mask.sum())}


@pytest.mark.parametrize("hf", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("loss_fn", [CrossEntropyLoss(), scored], ids=["fused", "scores"])
def test_the_host_waits_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: dict[str, Any], loss_fn: Any
) -> None:
    engine = make_engine(tmp_path, hf=hf, optimizer={"lr": 1e-3})
    accumulate, tolist = train_step.MicroBatchRunner.accumulate, Tensor.tolist
    plan = ForwardPlanner.plan
    waits, reads, step = Waits(), list[tuple[int, ...]](), ExitStack()

    def unwatched(*args: Any, **options: Any) -> Any:
        # A plan is made on the CPU, before its tensors go to a GPU.
        with _disable_current_modes():
            return plan(*args, **options)

    def watched(forward: Any, parts: Any, *options: Any) -> Any:
        step.enter_context(waits)
        reads.clear()  # what the host read of its own batch
        return accumulate(forward, parts, *options)

    def read(tensor: Tensor) -> Any:
        reads.append(tuple(tensor.shape))
        return tolist(tensor)

    monkeypatch.setattr(train_step.MicroBatchRunner, "accumulate", watched)
    monkeypatch.setattr(ForwardPlanner, "plan", unwatched)
    monkeypatch.setattr(Tensor, "tolist", read)
    with step:
        metrics = engine.train_batch(sft_batch(), loss_fn, loss_token_count)
    assert metrics["micro_batches"] >= 1 and metrics["grad_norm"] > 0
    assert waits.seen == []
    assert len(reads) == 1
