"""`activation_checkpoint: auto`: recompute as many of the first blocks as the memory of a rank requires.

The choice depends on the configuration, the model and the memory alone, and is equal on all ranks. The memory of the
largest rank is predicted (`archon.engine.memory.memory_model`) for micro-batches of `max_tokens_per_mb` tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from archon.engine.memory.memory_model import MemoryEstimate, MemoryModel
from archon.engine.memory.weight_shards import ModelWeights
from archon.models.args.base import BaseModelArgs
from archon.models.lora.targets import VISION_PREFIX, LoRASize
from archon.models.spec import ModelSpec
from archon.parallel.control_plane import ControlPlane
from archon.parallel.layout import ParallelLayout, parse_layout
from archon.schema.capacity import memory_bytes
from archon.schema.config import ActivationCheckpointConfig, EngineConfig
from archon.schema.errors import ConfigError
from archon.schema.numbers import read_integer

logger = logging.getLogger(__name__)

# Margins of the device's memory: cuBLAS, NCCL and others allocate 2 GiB outside of PyTorch's allocator on a GPU and
# half a GiB on a CPU, and the allocator loses 5 % of a step's allocations to fragmentation.
RESERVE = {"cuda": 2 << 30, "cpu": 1 << 29}
FRAGMENTATION = 0.05
# Micro-batches of the predicted step: more than one, so that gradients accumulate. A pipeline has this many per rank,
# which sizes its receive buffers.
MICRO_BATCHES = 2
GIB = 2**30


@dataclass(frozen=True)
class RecomputeChoice:
    """Choice of `auto`: the policy, the predicted memory of the largest rank, its budget, and the blocks of a stage."""

    policy: ActivationCheckpointConfig
    memory: MemoryEstimate
    budget: int
    blocks: int

    @property
    def bytes(self) -> int:
        """Predicted bytes, fragmentation included."""
        return self.memory.total + int(FRAGMENTATION * self.memory.step)

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is within the budget."""
        return self.bytes <= self.budget

    def __str__(self) -> str:
        mode, first = self.policy.mode, str(self.policy.selective).removeprefix("first ")
        recomputed = {"none": "recompute no block", "full": "recompute every block"}.get(mode, "")
        recomputed = recomputed or f"recompute the first {first} of {self.blocks} blocks"
        fits = "" if self.fits else "; this does not fit"
        return f"auto: {recomputed}, predicted {self.bytes / GIB:.1f} of {self.budget / GIB:.1f} GiB{fits}"


def choose_recompute(
    model: MemoryModel,
    config: EngineConfig,
    budget: int,
    layout: ParallelLayout | None = None,
    micro_batches: int | None = None,
) -> RecomputeChoice:
    """Recompute as few of the first blocks as the budget allows; all of them if nothing fits.

    Args:
        model: memory model of the trained model.
        config: the engine's configuration; its policy is ignored.
        budget: bytes of the largest rank.
        layout: used in place of `config.layout`.
        micro_batches: micro-batches of a step; None assumes several, and one if the optimizer steps in the backward.
    """
    layout = layout or parse_layout(config.layout)
    plan, tokens = model.plan(config, layout), config.max_tokens_per_mb
    if micro_batches is None:
        micro_batches = 1 if config.gradient_reduction == "step_in_backward" else MICRO_BATCHES * layout.pp
    blocks = model.args.n_layers if plan is None else max(end - first for first, end in plan.layers)

    def choice(first: int) -> RecomputeChoice:
        policy = ActivationCheckpointConfig(mode="none" if first == 0 else "full")
        if 0 < first < blocks:
            policy = ActivationCheckpointConfig(mode="selective", selective=f"first {first}")
        trial = config.model_copy(update={"activation_checkpoint": policy})
        memory = model.estimate_largest_rank(trial, layout, tokens, micro_batches)
        return RecomputeChoice(policy, memory, budget, blocks)

    # Without an optimizer there is no backward pass, so nothing is kept.
    nothing, everything = choice(0), choice(blocks)
    if nothing.fits or config.optimizer is None:
        return nothing
    if not everything.fits:
        return everything
    # From one recomputed block on, each further block takes less memory.
    low, high, best = 1, blocks, everything
    while low < high:
        middle = (low + high) // 2
        trial = choice(middle)
        if trial.fits:
            high, best = middle, trial
        else:
            low = middle + 1
    return best


def memory_model(
    config: EngineConfig,
    spec: ModelSpec,
    args: BaseModelArgs,
    loras: Mapping[str | None, Mapping[str, LoRASize]],
    device: torch.device,
    saved_modules: Collection[str] = (),
) -> MemoryModel:
    """Return the memory model of a model with these LoRAs by name and saved modules, on this device.

    Raises:
        ConfigError: the vision encoder is trained; its activations depend on the images.
    """
    vision = [name for matrices in loras.values() for name in matrices if name.startswith(VISION_PREFIX)]
    if config.vision == "trained" or vision:
        raise ConfigError(
            "activation_checkpoint.mode = auto cannot predict the activations of a trained vision encoder; choose "
            "none, selective or full, or train only the decoder"
        )
    gpu_memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    stored = "none" if config.lora is None else config.lora.quantize_base
    weights = ModelWeights.from_spec(spec, args, sum_lora_ranks(loras), saved_modules, stored)
    return MemoryModel(args, weights, gpu_memory)


def sum_lora_ranks(loras: Mapping[str | None, Mapping[str, LoRASize]]) -> dict[str, LoRASize]:
    """Return the matrix sizes of one LoRA with the total rank of several, by matrix name."""
    sizes = dict[str, LoRASize]()
    for matrices in loras.values():
        for name, size in matrices.items():
            sizes[name] = replace(size, rank=size.rank + (sizes[name].rank if name in sizes else 0))
    return sizes


def memory_budget(config: EngineConfig, device: torch.device, free: int) -> int:
    """Return the memory budget of a rank in bytes: the configured one, or `free` less the device's reserve."""
    budget = config.activation_checkpoint.memory_budget
    return free - RESERVE[device.type] if budget is None else int(budget * GIB)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a rank's GPU, or its part of a CPU's memory; the smallest of all ranks. A collective."""
    world = ControlPlane.world()
    if device.type == "cuda":
        return -world.all_reduce_max(-torch.cuda.mem_get_info(device)[0])
    local_ranks = max(1, read_integer(os.environ.get("LOCAL_WORLD_SIZE", "1"), "the variable LOCAL_WORLD_SIZE"))
    installed = memory_bytes() // local_ranks
    return -world.all_reduce_max(-installed)


def resolve_auto(
    config: EngineConfig,
    spec: ModelSpec,
    args: BaseModelArgs,
    loras: Mapping[str | None, Mapping[str, LoRASize]],
    device: torch.device,
    saved_modules: Collection[str] = (),
) -> EngineConfig:
    """Return the configuration with the policy that `auto` chooses for this device. A collective under `auto`."""
    if config.activation_checkpoint.mode != "auto":
        return config
    budget = memory_budget(config, device, free_memory(device))
    choice = choose_recompute(memory_model(config, spec, args, loras, device, saved_modules), config, budget)
    if ControlPlane.world().is_main:
        logger.log(logging.INFO if choice.fits else logging.WARNING, "activation_checkpoint %s", choice)
    return config.model_copy(update={"activation_checkpoint": choice.policy})
