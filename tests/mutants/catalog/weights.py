"""Mistakes in the maps between a checkpoint's tensors and parameters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "experts of a file are stacked in the order of their names, 10 before 2",
        "models/state_dict.py",
        "for row in sorted(by_row)])",
        "for row in sorted(by_row, key=str)])",
        ("tests/models/test_state_dict.py",),
    ),
)
