"""Several adapters over one base, each trained as if it were alone.

`lora.loras` names them, each with its own rank, alpha, targets, first values, optimizer and schedule. A batch says
in its field `lora` [B] which one each document has: an index into these names, or -1 for the base alone. All
documents run through the model together, and then each adapter is on its own:

- its loss is that of its documents, divided by their loss weight;
- its gradient is clipped by its own norm, and skipped by itself where that is not finite;
- it has its own moments, and its schedule counts its own steps: one without a document in a batch takes no step, not
  even of weight decay.

Metrics of an adapter are named NAME/loss, NAME/grad_norm and so on.
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
from archon.models.lora.model import single_lora_names
from archon.models.lora.targets import VISION_PREFIX, LoRASize
from archon.parallel.resolve import ResolvedLayout
from archon.schema.config import EngineConfig, NamedLoRAConfig, OptimizerConfig, SchedulerConfig
from archon.schema.errors import ConfigError


class LoRATrainer:
    """One of several adapters: its parameters, and what trains them.

    Attributes:
        sizes: by the native name of the matrix.
        names: of all its parameters in the whole model, each with the one that it has where its adapter is the only
            one.
        parameters: those of this rank.
        steps: batches so far with documents of it.
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
        own = config.lora.loras[name]
        self.name, self.sizes, self.steps = name, sizes, 0
        self.names = single_lora_names(sizes, name)
        self.parameters = [p for parameter, p in model.named_parameters() if parameter in self.names]
        self.optimizer: Optimizer | None = None
        self.schedule: LRSchedule | None = None
        self.config, scheduler, total_steps = lora_optimization(own, config, total_steps)
        if self.config is not None:
            self.optimizer = build_optimizer(model, self.config, self.names)
            self.schedule = LRSchedule(self.optimizer, self.config.lr, scheduler, total_steps)
        self._skips = SkippedSteps()

    @property
    def skipped_steps(self) -> int:
        """The steps so far that changed nothing, because the adapter's gradient was not finite."""
        return self._skips.total

    def step(self, norm: float) -> dict[str, float]:
        """Take an optimizer step on the gradients, of this norm. Returns `NAME/lr` and `NAME/skipped`.

        Raises UserError after too many steps in a row whose gradient was not finite.
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
        """Returns moments, schedule and counts; not copies."""
        state: dict[str, Any] = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        if self.optimizer is not None and self.schedule is not None:
            state["optimizer"] = optimizer_state(model, self.optimizer)
            state["scheduler"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any], known: Collection[str]) -> None:
        """Undo `state_dict`; `known` are the names that a pipeline's other ranks hold."""
        self.steps, self._skips.total = int(state["steps"]), int(state["skipped_steps"])
        if self.optimizer is not None and self.schedule is not None:
            moments: Mapping[str, Mapping[str, Any | Shard | LazyTensor]] = state["optimizer"]
            load_optimizer_state(model, self.optimizer, moments, [name for name in known if name in self.names])
            self.schedule.load_state_dict(state["scheduler"])


def lora_optimization(
    own: NamedLoRAConfig, config: EngineConfig, total_steps: int | None
) -> tuple[OptimizerConfig | None, SchedulerConfig, int | None]:
    """Returns an adapter's optimizer, schedule and its end: the model's where it has none of its own."""
    optimizer = config.optimizer if own.optimizer is None else own.optimizer
    return optimizer, own.scheduler or config.scheduler, own.total_steps or total_steps


def check_multi_lora(
    config: EngineConfig,
    layout: ResolvedLayout,
    total_steps: int | None,
    sizes: Mapping[str | None, Mapping[str, LoRASize]],
) -> None:
    """Raise ConfigError for blocks that are compiled, adapters of a vision tower, whose rows are patches and no tokens,
    and for a schedule that cannot be."""
    if config.lora is None or config.lora.loras is None:
        return
    if layout.compiled:
        raise ConfigError(
            "lora.loras has several adapters, whose documents are grouped anew in every batch, and blocks that are "
            "compiled cannot do that yet; set compile to false"
        )
    for name, matrices in sizes.items():
        if any(matrix.startswith(VISION_PREFIX) for matrix in matrices):
            raise ConfigError(
                f"lora.loras.{name}.targets names modules of the vision tower, which one adapter alone can have; "
                "leave them out, or train this adapter by itself"
            )
    for own in config.lora.loras.values():
        optimizer, scheduler, end = lora_optimization(own, config, total_steps)
        if optimizer is not None:
            check_schedule(scheduler, end)
