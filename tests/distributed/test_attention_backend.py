"""A backend that is one file and one call to register it trains like sdpa, in every way that attention is used.

The reference is one process with sdpa. The ranks compute with the naive backend: alone, over swapped heads and over
gathered keys, and with activations recomputed in full or but for the operators that the backend says are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.attention.registry import candidates, resolve_backend, saved_ops
from archon.tools.check.layouts import LENGTHS
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, batch, engine_config, write_config
from tests.distributed.features import BY_OP, FULL
from tests.distributed.matrix import run_case
from tests.distributed.verdict import examine
from tests.models import naive_attention

NAIVE: dict[str, Any] = {"attn_type": naive_attention.NaiveAttention.name}
RECOMPUTED: tuple[dict[str, Any], ...] = ({}, {"activation_checkpoint": FULL}, {"activation_checkpoint": BY_OP})
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("d1", {}),
    ("c2", {"context_parallel": "ulysses"}),
    ("c2", {"context_parallel": "allgather"}),
)
CASES = [
    *(Case(layout, config=NAIVE | way | recomputed) for layout, way in WAYS for recomputed in RECOMPUTED),
    *(Case(layout, "window", config=NAIVE | way) for layout, way in WAYS),
    Case("d1", "window", dtype="float32", config=NAIVE),
]


def run_naive(case: Case, folder: str) -> dict[str, float]:
    """On every rank, where importing this module has registered the backend."""
    assert case.config["attn_type"] == "naive"
    assert resolve_backend("naive", torch.device("cpu"), torch.float64) is candidates("naive")[0]
    return run_case(case, folder)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_new_backend_computes_what_sdpa_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    assert examine(case, ranks, reference, run_naive).beyond == {}


class Products(TorchDispatchMode):
    """Counts batched products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_keeps_what_the_backend_says(tmp_path: Path) -> None:
    """A step multiplies twice a document and layer forward and four times backward; recomputed in full, twice more."""
    path, counts = write_config(tmp_path, "dense"), []
    for recomputed in RECOMPUTED:
        case = Case("d1", config=NAIVE | recomputed)
        engine = ArchonEngine(engine_config(case, path, "d1", init_from_scratch=True))
        engine.initialize()
        with Products() as products:
            engine.train_batch(batch(LENGTHS, seed=1), CrossEntropyLoss(), loss_token_count)
        counts.append(products.count)
    forward = 2 * len(LENGTHS) * engine.args.n_layers
    assert counts == [3 * forward, 4 * forward, 3 * forward]


def test_each_backend_names_its_own_operators() -> None:
    assert saved_ops("naive") == {"aten::bmm"}
    assert saved_ops("fa4") == {"archon::flash_attention"}
    assert saved_ops("flash") == {"flash_attn::_flash_attn_varlen_forward", "archon::flash_attention"}
    assert saved_ops("auto") == saved_ops("sdpa") | saved_ops("varlen") | saved_ops("flash") | saved_ops("fa4")
