"""The mistakes, by room."""

from __future__ import annotations

from tests.mutants.catalog import (
    advantages,
    agents,
    attention,
    checkpoints,
    compat,
    configs,
    dcp,
    decoding,
    delta_nets,
    engine,
    environments,
    experts,
    fleet,
    fp8,
    generation,
    head,
    images,
    latents,
    layers,
    layouts,
    lora,
    losses,
    mtp,
    multi_lora,
    quantized,
    remote,
    replay,
    rollouts,
    rows,
    runs,
    sandbox,
    served_lora,
    training,
    training_service,
    update,
    vision,
    weights,
)
from tests.mutants.mutant import Mutant

ROOMS = (
    attention, latents, delta_nets, experts, fp8, layers, head, lora, multi_lora, configs, weights, layouts,
    engine, checkpoints, quantized, dcp, generation, decoding, training, runs, rollouts, remote, fleet, agents, compat,
    advantages, losses, update, served_lora, environments, replay, vision, images, rows,
    training_service, mtp, sandbox,
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
