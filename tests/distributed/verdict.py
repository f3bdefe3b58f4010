"""What a case's ranks found, held against the tolerances."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from archon.parallel.layout import parse_layout
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.matrix import run_case
from tests.tolerances import REORDER_FP32, REORDER_FP64, STEPS_FP64


@dataclass(frozen=True)
class Verdict:
    """The largest difference of each tensor over the ranks, as max|a - b| / max|b|, and those beyond the tolerance."""

    differences: dict[str, float]
    beyond: dict[str, float]
    seconds: float

    def worst(self, prefix: str) -> float | None:
        """The largest difference of the tensors whose name starts so; None where there are none."""
        return max((value for name, value in self.differences.items() if name.startswith(prefix)), default=None)


def examine(
    case: Case,
    ranks: Callable[[int], Pool],
    reference: Callable[[Case], Path],
    function: Callable[..., dict[str, float]] = run_case,
    *args: Any,
) -> Verdict:
    """Run `function(case, folder, *args)` on the ranks of the case's layout.

    Raises AssertionError where the ranks do not hold every parameter between them, or where one of them fails.
    """
    folder = reference(case)
    started = time.monotonic()
    found = ranks(parse_layout(case.layout).world_size).run(function, case, str(folder), *args)
    seconds = time.monotonic() - started
    with safe_open(str(folder / "reference.safetensors"), "pt") as file:
        names = set(file.keys())
    assert set().union(*found) == names, "between them the ranks hold every parameter"
    # A difference that is not a number is one beyond any tolerance.
    differences = {
        name: max((each[name] if each[name] == each[name] else float("inf")) for each in found if name in each)
        for name in sorted(names)
    }
    beyond = {name: value for name, value in differences.items() if value > _tolerance(case, name)}
    return Verdict(differences, beyond, seconds)


def _tolerance(case: Case, name: str) -> float:
    """Adam magnifies reordering near zero, so that in float32 nothing is claimed of the weights after steps."""
    if name.startswith("weight."):
        return STEPS_FP64 if case.dtype == "float64" else float("inf")
    return REORDER_FP64 if case.dtype == "float64" else REORDER_FP32
