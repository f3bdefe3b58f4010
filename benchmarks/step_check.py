"""Whether the sides of a training step compute the same, before any is timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.tools.bench.origin import NumericCheck
from benchmarks import harness

# float32: the same sums in another order. Sums over 3.6e3 tokens of terms that agree to 1e-6.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float8": 1e-1}
# After one AdamW step: rounding decides its sign near a zero gradient.
TOLERANCE_AFTER_STEP = {"float32": 1e-4, "bfloat16": 5e-2, "float8": 1e-1}


def compare(facts: Mapping[str, dict[str, Any]], dtype: str, ours: str = "archon") -> list[NumericCheck]:
    """Compare the first two steps of every side with `ours`.

    Raises:
        DisagreementError: a side differs.
    """
    checks = []
    for what in ("loss", "grad_norm", "loss_after_one_step"):
        tolerance = (TOLERANCE_AFTER_STEP if what == "loss_after_one_step" else TOLERANCE)[dtype]
        theirs = {peer: found[what] for peer, found in facts.items() if peer != ours}
        checks += harness.check_close(what, facts[ours][what], theirs, tolerance)
    return checks
