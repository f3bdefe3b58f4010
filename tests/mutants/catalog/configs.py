"""Mistakes in reading a config's layers."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import PARITY
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the first sliding layer is full",
        "models/hf/config.py",
        "return [layer >= first for layer in range(n_layers)]",
        "return [layer > first for layer in range(n_layers)]",
        ("tests/models/test_hf_config.py",),
    ),
    Mutant(
        "every n-th sparse layer is counted from zero",
        "models/args/moe.py",
        "(layer + 1) % self.decoder_sparse_step == 0",
        "layer % self.decoder_sparse_step == 0",
        (f"{PARITY}[qwen2_moe-1]",),
    ),
    Mutant(
        "layers with a window rotate as the others do",
        "models/args/base.py",
        'if use == "local":',
        'if use == "none":',
        (f"{PARITY}[olmo3-0]",),
    ),
    Mutant(
        "every n-th layer without a window is counted from zero",
        "models/hf/config.py",
        "slides = [(layer + 1) % period != 0 for layer in range(n_layers)]",
        "slides = [layer % period != 0 for layer in range(n_layers)]",
        ("tests/models/test_hf_config.py",),
    ),
)
