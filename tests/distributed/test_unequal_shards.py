"""Data-parallel ranks with unequal numbers of micro-batches: every call of the engine returns what one process does.
A share that one rank refuses is refused by all of them, and the next batch is as if it had not been."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archon.engine.batch import PackedBatch, pack
from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.parallel.layout import parse_layout
from archon.schema.errors import BatchError
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, batch, engine_config, loss_of
from tests.distributed.matrix import experts_of
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


def engine_of(case: Case, folder: str) -> ArchonEngine:
    engine = ArchonEngine(engine_config(case, f"{folder}/checkpoint", case.layout, max_tokens_per_mb=MAX_TOKENS))
    engine.initialize()
    return engine


def run_call(case: Case, folder: str, call: str) -> tuple[slice, dict[str, Tensor]]:
    """This rank's rows, and what the call finds for them: names that begin with `rows.` are [B, S]."""
    engine = engine_of(case, folder)
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


def no_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:0] for name, value in rows.items()}


def no_documents(rows: dict[str, Tensor]) -> PackedBatch:
    nothing = torch.zeros(0, dtype=torch.int64)
    fields = {"loss_mask": nothing, "target": torch.zeros(0, dtype=torch.float64)}
    return PackedBatch(nothing, nothing, nothing, torch.zeros(1, dtype=torch.int32), 0, (), fields, source=nothing)


def too_long(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([value] * 2, 1) for name, value in rows.items()}


def unknown_token(rows: dict[str, Tensor]) -> PackedBatch:
    return pack(rows | {"input_ids": rows["input_ids"] + 1000})


def bad_temperature(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a fault: one token of the last document has `value` as its temperature."""

    def fault(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        temperatures = torch.full(rows["input_ids"].shape, 0.7)
        temperatures[-1, 5] = value
        return rows | {"temperatures": temperatures}

    return fault


def bad_experts(*experts: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a fault: one token of the last document has `experts` in the second MoE layer."""

    def fault(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        record = experts_of("moe", rows["input_ids"].shape, seed=0)
        record[-1, 3, 1] = torch.tensor(experts, dtype=torch.uint8)
        return rows | {"routed_experts": record}

    return fault


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor] | PackedBatch], str]] = {
    "no_rows": (no_rows, r"input_ids must be integers \[B, S\] with B >= 1 and S >= 1, got int64 \(0, 20\)"),
    "no_documents": (no_documents, "the batch has no document; .* loss_mask of zeros"),
    "too_long": (too_long, r"document 0 has 40 tokens, more than max_tokens_per_mb = 24"),
    "unknown_token": (unknown_token, r"token id \d+ is outside the model's vocabulary of 104"),
    "negative_temperature": (
        bad_temperature(-0.5),
        r"field 'temperatures' has -0.5; expected positive, finite numbers",
    ),
    "nan_temperature": (bad_temperature(math.nan), r"field 'temperatures' has nan; expected positive, finite numbers"),
    "partial_experts": (
        bad_experts(2, 255, 1),
        r"field 'routed_experts' has the experts 2, unknown, 1 for token 3 of the pack in MoE layer 1; expected all",
    ),
    "repeated_expert": (
        bad_experts(4, 1, 4),
        r"field 'routed_experts' has the experts 4, 1, 4 for token 3 of the pack in MoE layer 1; expected different",
    ),
}
EXPERT_FAULTS = ("partial_experts", "repeated_expert")


def refuse_and_go_on(case: Case, folder: str, call: str, fault: str) -> tuple[str, slice, dict[str, Tensor]]:
    """What this rank is told of a batch that the last data-parallel rank refuses, and the call on the one after it."""
    engine = engine_of(case, folder)
    of_all, dp = batch(LENGTHS, seed=7), engine.ranks.dp
    own = SHARES[dp.size][dp.rank]
    rows = {name: value[own] for name, value in of_all.items()}
    first = REFUSED[fault][0](rows) if dp.rank == dp.size - 1 else rows
    message = ""
    try:
        CALLS[call](engine, case, first)  # type: ignore[arg-type]
    except BatchError as error:
        message = str(error)
    return message, own, CALLS[call](engine, case, rows)


@pytest.mark.parametrize(
    ("layout", "call", "fault"),
    [
        *(("d2", call, "too_long") for call in CALLS),
        *(("d2", "train_batch", fault) for fault in REFUSED if fault not in {"too_long", *EXPERT_FAULTS}),
        *(("d2e2", "train_batch", fault) for fault in EXPERT_FAULTS),
        ("d2", "forward_batch", "nan_temperature"),
        ("d2c2", "forward_batch", "no_documents"),
        ("d2p2", "eval_batch", "no_rows"),
    ],
)
def test_a_share_that_one_rank_refuses_is_refused_by_all(
    layout: str, call: str, fault: str, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    model = "moe" if fault in EXPERT_FAULTS else "dense"
    case = Case(layout, model)
    folder = str(reference(case))
    _, expected = run_call(Case("d1", model), folder, call)
    world_size = parse_layout(layout).world_size
    found = ranks(world_size).run(refuse_and_go_on, case, folder, call, fault, timeout=HANG_SECONDS)
    refusals = [message for message, _, _ in found if re.match(REFUSED[fault][1], message)]
    assert len(refusals) == world_size / 2
    for message, own, results in found:
        assert message in refusals or re.match(rf"rank \d refused its share of the batch: {REFUSED[fault][1]}", message)
        for name, value in results.items():
            wanted = expected[name][own] if name.startswith("rows.") else expected[name]
            torch.testing.assert_close(value, wanted, rtol=STEPS_FP64, atol=STEPS_FP64)
