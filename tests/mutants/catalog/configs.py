"""Mistakes in reading a config's layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the first sliding layer is full",
        "models/hf_config.py",
        "return [layer >= first for layer in range(n_layers)]",
        "return [layer > first for layer in range(n_layers)]",
        ("tests/models/test_hf_config.py",),
    ),
    Mutant(
        "every n-th sparse layer is counted from zero",
        "models/moe_args.py",
        "(layer + 1) % self.decoder_sparse_step == 0",
        "layer % self.decoder_sparse_step == 0",
        ("tests/models/test_parity.py",),
    ),
)
