"""Multi-LoRA: several LoRAs over one base, each trained as if it were alone.

`lora.loras` configures each LoRA by name: rank, alpha, targets, initial values, optimizer and schedule. The batch field
`lora` [B] selects the LoRA of each document: an index into these names, or -1 for the base model. All documents run
through the model together, and every LoRA is trained separately:

- its loss is the sum over its documents, divided by their loss weight;
- its gradient is clipped by the norm of this LoRA, and its step is skipped if that norm is not finite;
- it has separate moments, and its schedule counts only its steps. A LoRA without a document in a batch takes no step
  and no weight decay.

The metrics of a LoRA are named NAME/loss, NAME/grad_norm and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from archon.checkpoint.safetensors_file import LazyTensor
from archon.checkpoint.state_tree import Shard
from archon.engine.optim import LRSchedule, SkippedSteps, build_optimizer, check_schedule, clip_gradients
from archon.engine.state import load_optimizer_state, optimizer_state
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.lora.model import single_lora_names
from archon.models.lora.targets import EMBEDDING, HEAD, VISION_PREFIX, LoRASize
from archon.parallel.compile import compile_enabled
from archon.parallel.resolve import ResolvedLayout
from archon.schema.config import EngineConfig, NamedLoRAConfig, OptimizerConfig, SchedulerConfig
from archon.schema.errors import ConfigError


class LoRATrainer:
    """Parameters, optimizer and schedule of one LoRA of a multi-LoRA model.

    Attributes:
        sizes: LoRA sizes by native matrix name.
        names: parameter name in this model to its name in a model with only this LoRA.
        parameters: this rank's parameters of the LoRA.
        steps: the number of batches with documents of this LoRA.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        sizes: Mapping[str, LoRASize],
        config: EngineConfig,
        total_steps: int | None,
    ) -> None:
        assert config.lora is not None and config.lora.loras is not None
        lora_config = config.lora.loras[name]
        self.name, self.sizes, self.steps = name, sizes, 0
        self.names = single_lora_names(sizes, name)
        self.parameters = [p for parameter, p in model.named_parameters() if parameter in self.names]
        self.optimizer: Optimizer | None = None
        self.schedule: LRSchedule | None = None
        self.config, scheduler, total_steps = lora_optimization(lora_config, config, total_steps)
        if self.config is not None:
            compiled = compile_enabled(config.compile, self.parameters[0].device.type)
            self.optimizer = build_optimizer(model, self.config, self.names, compiled=compiled)
            self.schedule = LRSchedule(self.optimizer, self.config.lr, scheduler, total_steps)
        self._skips = SkippedSteps()

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because the gradient of the LoRA was not finite."""
        return self._skips.total

    def step(self, norm: float) -> dict[str, float]:
        """Take an optimizer step on gradients of this norm; return `NAME/lr` and `NAME/skipped`.

        Raises:
            UserError: too many consecutive gradients were not finite.
        """
        assert self.optimizer is not None and self.schedule is not None and self.config is not None
        finite = abs(norm) < float("inf")
        if finite:
            clip_gradients(self.parameters, norm, self.config.max_grad_norm)
            self.optimizer.step()
        self.steps += 1
        self._skips.count(not finite, self.steps, self.config.max_skipped_in_a_row)
        return {f"{self.name}/lr": self.schedule.lr, f"{self.name}/skipped": float(not finite)}

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return moments, schedule and step counts, without copying."""
        state: dict[str, Any] = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        if self.optimizer is not None and self.schedule is not None:
            state["optimizer"] = optimizer_state(model, self.optimizer)
            state["scheduler"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any], known: Collection[str]) -> None:
        """Load a `state_dict`; `known` are the parameter names of the whole pipeline."""
        self.steps, self._skips.total = int(state["steps"]), int(state["skipped_steps"])
        if self.optimizer is not None and self.schedule is not None:
            moments: Mapping[str, Mapping[str, Any | Shard | LazyTensor]] = state["optimizer"]
            load_optimizer_state(model, self.optimizer, moments, [name for name in known if name in self.names])
            self.schedule.load_state_dict(state["scheduler"])


def lora_optimization(
    lora: NamedLoRAConfig, config: EngineConfig, total_steps: int | None
) -> tuple[OptimizerConfig | None, SchedulerConfig, int | None]:
    """Return the optimizer, schedule and total steps of a LoRA; the engine's are the defaults."""
    optimizer = config.optimizer if lora.optimizer is None else lora.optimizer
    return optimizer, lora.scheduler or config.scheduler, lora.total_steps or total_steps


def check_loras(
    config: EngineConfig,
    layout: ResolvedLayout,
    total_steps: int | None,
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str | None, Mapping[str, LoRASize]],
    saved: Mapping[str | None, Collection[str]],
) -> None:
    """Raise ConfigError for dropout and DoRA without support, and for invalid schedules of several LoRAs.

    Several LoRAs support no compiled blocks, no DoRA, no saved modules and no LoRA of a vision encoder: a vision
    encoder's rows are patches, and patches belong to no document.
    """
    _check_dropout(config, layout, adapter, sizes)
    for matrices in sizes.values():
        if config.fp8 != "none" and any(size.dora for size in matrices.values()):
            raise ConfigError(f"fp8 is {config.fp8}, and DoRA of FP8 matmuls is not supported; set fp8 to none")
        for matrix, size in matrices.items():
            if size.dora and matrix.startswith(VISION_PREFIX):  # its parameters have one FSDP group, of one dtype
                raise ConfigError(
                    f"lora has DoRA of {matrix!r}, and DoRA of a vision encoder is not supported; leave it out of "
                    "targets"
                )
    if config.lora is None or config.lora.loras is None:
        return
    if layout.compiled:
        raise ConfigError(
            "lora.loras groups documents by LoRA in every batch, and compiled blocks do not support that; set compile "
            "to false"
        )
    for name, matrices in sizes.items():
        if any(matrix.startswith(VISION_PREFIX) for matrix in matrices):
            raise ConfigError(
                f"lora.loras.{name}.targets names modules of the vision encoder, and multi-LoRA does not support them; "
                "leave them out, or train this LoRA alone"
            )
        if saved[name]:
            raise ConfigError(
                f"lora.loras.{name} has modules_to_save, and multi-LoRA shares all other weights; remove it, or train "
                "this LoRA alone"
            )
        if matrices.keys() & {EMBEDDING, HEAD}:
            raise ConfigError(
                f"lora.loras.{name}.targets names the embedding or the head, and multi-LoRA does not support them; "
                "leave them out, or train this LoRA alone"
            )
        if any(size.dora for size in matrices.values()):
            raise ConfigError(
                f"lora.loras.{name} has DoRA, and multi-LoRA does not support it; set dora to false, or train this "
                "LoRA alone"
            )
    for lora in config.lora.loras.values():
        optimizer, scheduler, end = lora_optimization(lora, config, total_steps)
        if optimizer is not None:
            check_schedule(scheduler, end)


def _check_dropout(
    config: EngineConfig,
    layout: ResolvedLayout,
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str | None, Mapping[str, LoRASize]],
) -> None:
    """Raise ConfigError where training cannot drop the inputs of a LoRA.

    Rows of experts and of the vision encoder have no keys of tokens; PEFT refuses stacked experts as well.
    """
    if config.optimizer is None:
        return
    for name, matrices in sizes.items():
        dropped = {matrix: size.dropout for matrix, size in matrices.items() if size.dropout}
        if not dropped:
            continue
        field = "lora.dropout" if name is None else f"lora.loras.{name}.dropout"
        has = f"{field} is {next(iter(dropped.values())):g}, and"
        if name is not None:
            raise ConfigError(f"{has} multi-LoRA trains without dropout; set it to 0, or train this LoRA alone")
        if layout.compiled:
            raise ConfigError(f"{has} compiled blocks do not support dropout; set it to 0, or compile to false")
        if HEAD in dropped:
            raise ConfigError(f"{has} a LoRA of the head does not support dropout; set it to 0, or leave the head out")
        for matrix in dropped:
            if matrix.startswith(VISION_PREFIX) or len(adapter.native_shapes[matrix]) > 2:
                kind = "the vision encoder" if matrix.startswith(VISION_PREFIX) else "experts"
                raise ConfigError(
                    f"{has} LoRA matrices of {kind} do not support dropout; set it to 0, or leave them out of targets"
                )
