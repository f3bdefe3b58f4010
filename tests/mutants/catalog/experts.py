"""Mistakes in routers and experts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the balancing bias is part of the routing weights",
        "models/layers/moe.py",
        "weights = p.gather(-1, experts)",
        "weights = (p if self.expert_bias is None else p + self.expert_bias).gather(-1, experts)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "the router's softmax runs in the compute dtype",
        "models/layers/moe.py",
        "return self.gate(x).to(wide)",
        "return self.gate(x)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "padding's probabilities count in the balancing loss",
        "models/layers/moe.py",
        "kept = p if valid_mask is None else p * ones",
        "kept = p",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "the weights of chosen experts are divided by the sum over all experts",
        "models/layers/moe.py",
        "weights = weights / (weights.sum(-1, keepdim=True) + self.spec.normalize_epsilon)",
        "weights = weights / (p.sum(-1, keepdim=True) + self.spec.normalize_epsilon)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "the balancing loss is not squared in the number of tokens",
        "models/layers/moe.py",
        "return (counts * probabilities).sum() * counts.shape[0] / tokens.square()",
        "return (counts * probabilities).sum() * counts.shape[0] / (tokens * counts.sum())",
        ("tests/engine/test_balancing.py",),
    ),
)
