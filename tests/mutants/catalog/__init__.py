"""The mistakes, by room."""

from __future__ import annotations

from tests.mutants.catalog import (
    advantages,
    attention,
    checkpoints,
    configs,
    engine,
    experts,
    generation,
    head,
    layers,
    layouts,
    losses,
    rollouts,
    training,
    update,
    weights,
)
from tests.mutants.mutant import Mutant

ROOMS = (
    attention, experts, layers, head, configs, weights, layouts, engine, checkpoints, generation, training, rollouts,
    advantages, losses, update,
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
