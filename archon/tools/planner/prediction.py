"""Predicted memory and time of a training run on a named GPU, for `--dry-run --gpu` and the table of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from archon.engine.build import lora_sizes, lora_specs, saved_modules
from archon.engine.memory.memory_model import MemoryEstimate
from archon.engine.memory.recompute import (
    GIB,
    RecomputeChoice,
    choose_recompute,
    free_memory,
    memory_budget,
    memory_model,
    sum_lora_ranks,
)
from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.lora.targets import LoRASize
from archon.models.spec import ModelSpec
from archon.parallel.layout import parse_layout
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.planner.hardware import Hardware
from archon.tools.planner.search import Planner
from archon.tools.planner.time_model import StepTime


@dataclass(frozen=True)
class Batch:
    """Documents of an optimizer step over all ranks, and their length in tokens."""

    documents: int
    seq: int


@dataclass(frozen=True)
class Prediction:
    """Predicted step of a training run.

    Attributes:
        choice: result of `activation_checkpoint.mode = auto`; None for other modes.
        memory: memory of the largest rank.
        used: bytes of the largest rank, with fragmentation and libraries.
        host: pinned host memory of a rank for offloaded activations, in bytes.
        seconds: time of a step.
        tokens_per_second: tokens per second of one GPU.
    """

    hardware: Hardware
    batch: Batch
    choice: RecomputeChoice | None
    memory: MemoryEstimate
    used: int
    host: int
    seconds: StepTime
    tokens_per_second: float

    @property
    def headroom(self) -> int:
        """Free bytes of the GPU; negative if the run does not fit."""
        return self.hardware.memory_bytes - self.used

    def lines(self) -> list[str]:
        """Return the prediction as text."""
        m, hw = self.memory, self.hardware
        parts = {
            "weights": m.parameters,
            "LoRA": m.lora,
            "moments": m.moments,
            "gradients": m.gradients + m.unreduced,
            "gathered": m.gathered,
            "activations": m.activations,
            "head": m.head,
            "libraries and fragmentation": self.used - m.total,
        }
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= GIB / 20)
        step = (
            f"{self.seconds.total:.2f} s for a step of {self.batch.documents:,} documents of {self.batch.seq:,} tokens"
        )
        return [
            *([] if self.choice is None else [f"activation_checkpoint {self.choice}"]),
            f"{hw.name}, predicted: {self.used / GIB:.1f} of {hw.memory_bytes / GIB:.1f} GiB ({shown})",
            *([f"{hw.name}, predicted: {self._offload()}"] if self.host else []),
            f"{hw.name}, predicted: {step}, {self.tokens_per_second:,.0f} tok/s of one GPU",
        ]

    def _offload(self) -> str:
        waits = f"waits {self.seconds.offload:.2f} s for the copies" if self.seconds.offload else "hides the copies"
        return f"{self.host / GIB:.1f} GiB of pinned host memory per rank for the inputs of blocks; a step {waits}"


def predict(config: EngineConfig, hf_config: Mapping[str, Any], hardware: Hardware, batch: Batch) -> Prediction:
    """Return the prediction of training steps on full micro-batches.

    Raises:
        ConfigError: the memory of a GPU is too small, or the configuration trains MTP layers.
    """
    spec, args, loras, saved = _read_model(config, hf_config)
    stored = "none" if config.lora is None else config.lora.quantize_base
    planner, layout = Planner(spec, args, hardware, sum_lora_ranks(loras), saved, stored), parse_layout(config.layout)
    packed = max(1, min(config.max_tokens_per_mb // batch.seq, -(-batch.documents // layout.dp)))
    micro_batches = -(-batch.documents // (layout.dp * packed))
    choice = None
    if config.activation_checkpoint.mode == "auto":
        budget = config.activation_checkpoint.memory_budget
        free = hardware.memory_bytes - hardware.reserve_bytes
        choice = choose_recompute(planner.memory_model, config, free if budget is None else int(budget * GIB))
        config = config.model_copy(update={"activation_checkpoint": choice.policy})
    memory = planner.memory_model.estimate_largest_rank(config, layout, config.max_tokens_per_mb, micro_batches)
    host = planner.memory_model.host_bytes(config, layout, config.max_tokens_per_mb, micro_batches)
    used = memory.total + hardware.reserve_bytes + int(hardware.fragmentation * memory.step)
    seconds = planner.seconds(config, batch.seq, batch.documents)
    rate = batch.documents * batch.seq / layout.world_size / seconds.total
    prediction = Prediction(hardware, batch, choice, memory, used, host, seconds, rate)
    if prediction.headroom < 0:
        offload = ""
        recompute = "" if choice else "set activation_checkpoint.mode = auto, "
        if config.activation_checkpoint.mode != "offload":
            offload = "set it to offload, " if recompute else "set activation_checkpoint.mode = offload, "
        raise ConfigError(
            f"{hardware.name} has {hardware.memory_bytes / GIB:.1f} GiB, and a rank needs {used / GIB:.1f}; lower "
            f"max_tokens_per_mb, {recompute}{offload}or use more GPUs in the layout"
        )
    return prediction


def predict_recompute(config: EngineConfig, hf_config: Mapping[str, Any], device: torch.device) -> RecomputeChoice:
    """Return the choice of `activation_checkpoint.mode = auto` on this device."""
    spec, args, loras, saved = _read_model(config, hf_config)
    budget = memory_budget(config, device, free_memory(device))
    return choose_recompute(memory_model(config, spec, args, loras, device, saved), config, budget)


def _read_model(
    config: EngineConfig, hf_config: Mapping[str, Any]
) -> tuple[ModelSpec, BaseModelArgs, dict[str | None, dict[str, LoRASize]], tuple[str, ...]]:
    if config.mtp_loss_weight:
        raise ConfigError(
            f"mtp_loss_weight = {config.mtp_loss_weight:g} trains multi-token-prediction layers, and the planner does "
            "not count their memory and time; set it to 0 for the prediction"
        )
    spec = get_model_spec(str(hf_config["model_type"]))
    args = spec.model_args_class.from_hf_config(hf_config, is_critic=config.is_critic)
    adapter = spec.state_dict_adapter_class(dict(hf_config))
    sizes = {name: lora_sizes(adapter, shape) for name, shape in lora_specs(config).items()}
    saved = () if config.lora is None else saved_modules(adapter, config.lora, sizes.get(None, {}))
    return spec, args, sizes, saved
