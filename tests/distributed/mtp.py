"""What one rank does in the tests of multi-token prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig
from tests.engine.tiny import sft_batch

LENGTHS = (13, 5, 7, 2, 21, 8)


def train(path: str, layout: str, out: str | None, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return gradients, and the weights after three clipped steps; export them to `out`."""
    config = {"path": path, "device": "cpu", "layout": layout, "mtp_loss_weight": 0.3, "max_tokens_per_mb": 32}
    engine = ArchonEngine(EngineConfig.parse(config | {"optimizer": {"lr": 1e-2, "max_grad_norm": 0.05}} | options))
    engine.initialize()
    rank, size = engine.ranks.dp.rank, engine.ranks.dp.size
    rows = {name: value[rank::size] for name, value in sft_batch(LENGTHS).items()}
    grads, metrics = engine.gradients(rows, CrossEntropyLoss(), loss_token_count)
    results = {f"grad.{name}": x for name, x in grads.items()}
    results |= {name: torch.tensor(metrics[name]) for name in ("loss", "grad_norm", "mtp_loss", "mtp_grad_norm")}
    for _ in range(3):
        engine.train_batch(rows, CrossEntropyLoss(), loss_token_count)
        engine.step_lr_scheduler()
    scores = engine.forward_batch(rows)  # without MTP layers
    assert scores.isfinite().all()
    if out is not None:
        engine.save(out)
    return results | {f"weight.{name}": x.clone() for name, x in engine.weights()}
