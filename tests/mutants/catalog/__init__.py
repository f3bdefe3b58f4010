"""The mistakes, by room."""

from __future__ import annotations

from tests.mutants.catalog import (
    adapters,
    advantages,
    agents,
    attention,
    checkpoints,
    compat,
    configs,
    dcp,
    delta_nets,
    engine,
    environments,
    experts,
    fleet,
    fp8,
    generation,
    head,
    latents,
    layers,
    layouts,
    losses,
    pictures,
    quantized,
    remote,
    replay,
    rollouts,
    runs,
    served_adapters,
    several_adapters,
    training,
    update,
    vision,
    weights,
)
from tests.mutants.mutant import Mutant

ROOMS = (
    attention, latents, delta_nets, experts, fp8, layers, head, adapters, several_adapters, configs, weights, layouts,
    engine, checkpoints, quantized, dcp, generation, training, runs, rollouts, remote, fleet, agents, compat,
    advantages, losses, update, served_adapters, environments, replay, vision, pictures,
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
