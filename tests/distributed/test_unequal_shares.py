"""Data-parallel ranks with unequal numbers of micro-batches: every call of the engine returns what one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.parallel.layout import parse_layout
from tests.distributed.cases import Case, batch, engine_config, loss_of
from tests.distributed.pool import Pool
from tests.tolerances import REORDER_FP64, STEPS_FP64

pytestmark = pytest.mark.xdist_group("ranks")

LENGTHS = (20, 20, 20, 20)
MAX_TOKENS = 24
"""Room for one document, so that a rank has as many micro-batches as documents."""
SHARES = {1: (slice(0, 4),), 2: (slice(0, 3), slice(3, 4))}
"""Rows of each data-parallel rank, by the number of such ranks."""
HANG_SECONDS = 60.0
"""A case takes two seconds."""

CASES = [Case("d2"), Case("d2", critic=True), Case("d2e2", "moe"), Case("d2c2")]


def train(engine: ArchonEngine, case: Case, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    metrics = engine.train_batch(rows, loss_of(case), loss_token_count, 0.8)
    numbers = {name: torch.tensor(metrics[name]) for name in ("loss", "grad_norm", "tokens", "loss_weight")}
    return numbers | {f"weight.{name}": tensor.clone() for name, tensor in engine.weights()}


def evaluate(engine: ArchonEngine, case: Case, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    metrics = engine.eval_batch(rows, loss_of(case), loss_token_count, 0.8)
    return {name: torch.tensor(value) for name, value in metrics.items()}


def score(engine: ArchonEngine, case: Case, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "rows.all": engine.forward_batch(rows, 0.8),
        "rows.trained": engine.forward_batch(rows, 0.8, only_trained=True),
    }


def score_with_entropy(engine: ArchonEngine, case: Case, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    logprobs, entropy = engine.forward_with_entropy(rows, 0.8)
    return {"rows.logprobs": logprobs, "rows.entropy": entropy}


CALLS = {
    "train_batch": train,
    "eval_batch": evaluate,
    "forward_batch": score,
    "forward_with_entropy": score_with_entropy,
}


def run_call(case: Case, folder: str, call: str) -> tuple[slice, dict[str, Tensor]]:
    """This rank's rows, and what the call finds for them: names that begin with `rows.` are [B, S]."""
    engine = ArchonEngine(engine_config(case, f"{folder}/checkpoint", case.layout, max_tokens_per_mb=MAX_TOKENS))
    engine.initialize()
    own = SHARES[engine.ranks.dp.size][engine.ranks.dp.rank]
    rows = {name: value[own] for name, value in batch(LENGTHS, seed=7).items()}
    return own, CALLS[call](engine, case, rows)


@pytest.mark.parametrize(
    ("case", "call"),
    [(case, call) for case in CASES for call in CALLS if not (case.critic and call == "forward_with_entropy")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_unequal_shares_give_what_one_process_gives(
    case: Case, call: str, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    folder = str(reference(case))
    _, expected = run_call(Case("d1", case.model, case.dtype, case.critic), folder, call)
    tolerance = STEPS_FP64 if call == "train_batch" else REORDER_FP64
    found = ranks(parse_layout(case.layout).world_size).run(run_call, case, folder, call, timeout=HANG_SECONDS)
    for own, results in found:
        assert results.keys() == expected.keys()
        for name, value in results.items():
            wanted = expected[name][own] if name.startswith("rows.") else expected[name]
            torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
