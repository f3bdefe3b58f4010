"""LoRAs that are added and removed while an engine runs, over one frozen base.

`ArchonEngine.train_batch` accumulates gradients and steps in one call, on the LoRAs of its configuration. A training
service needs the two apart, on LoRAs that come and go: `LoRAPool.accumulate` adds gradients of documents of several
LoRAs, and `LoRAPool.step` updates one of them. Model, micro-batches and optimizer are the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from archon.engine import heap
from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import LossFn
from archon.engine.low_bit_adamw import MOMENTS
from archon.engine.micro_batch import micro_batches
from archon.engine.optim import build_optimizer, clip_gradients, gradient_norm
from archon.engine.threads import adjust_threads
from archon.engine.train_step import BatchLoss, LossGroup, MicroBatchRunner
from archon.models.lora.layers import MultiLoRALayer
from archon.models.lora.model import add_lora, initializers, single_lora_names
from archon.models.lora.targets import LoRASize
from archon.schema.config import OptimizerConfig
from archon.schema.errors import ConfigError, NotFiniteError, UserError


@dataclass(frozen=True)
class AdamStep:
    """Settings of one AdamW step [Loshchilov & Hutter 2019, algorithm 2]; `max_grad_norm` 0 never clips."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0


@dataclass(frozen=True)
class PooledLoRA:
    """A LoRA of the pool.

    Attributes:
        sizes: LoRA sizes by native matrix name.
        parameters: the trained parameters, by their name in a model with only this LoRA.
        optimizer: AdamW over the parameters.
    """

    sizes: Mapping[str, LoRASize]
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer


class LoRAPool:
    """The LoRAs of an engine in one process; the engine has neither an optimizer nor LoRAs of its configuration."""

    def __init__(self, engine: ArchonEngine) -> None:
        config, built = engine.config, engine.built
        if config.optimizer is not None or config.lora is not None or config.is_critic:
            raise ConfigError("a LoRA pool needs an engine of an actor with optimizer: null and lora: null")
        if built.layout.dims.world_size > 1 or built.swaps_weights or built.layout.compiled:
            raise ConfigError(
                f"a LoRA pool runs in one process without compiled blocks, and the layout is {config.layout}; "
                "set layout to d1 and compile to false"
            )
        self._engine, self._loras = engine, dict[str, PooledLoRA]()
        engine.model.requires_grad_(False)

    def __getitem__(self, name: str) -> PooledLoRA:
        return self._loras[name]

    def __contains__(self, name: str) -> bool:
        return name in self._loras

    def add(self, name: str, sizes: Mapping[str, LoRASize], seed: int) -> None:
        """Add a LoRA that starts at the base model, with the weights of a configured LoRA of the same `seed`."""
        engine = self._engine
        model, dtype = engine.full_model, torch.promote_types(engine.built.builder.compute_dtype, torch.float32)
        with torch.device(engine.device):
            add_lora(model, sizes, dtype, name)
        parameters = dict(model.named_parameters())
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for parameter, fill in initializers(model, "zero", name):
                drawn = torch.empty(parameters[parameter].shape, dtype=dtype)
                fill(drawn)
                parameters[parameter].copy_(drawn)
        names = single_lora_names(sizes, name)
        optimizer = build_optimizer(model, OptimizerConfig(), names)
        self._loras[name] = PooledLoRA(sizes, {single: parameters[long] for long, single in names.items()}, optimizer)

    def remove(self, name: str) -> None:
        """Remove a LoRA, its gradients and its moments."""
        del self._loras[name]
        for module in self._engine.model.modules():
            if isinstance(module, MultiLoRALayer) and name in module:
                del module[name]

    def accumulate(self, batch: PackedBatch, names: Sequence[str], loss_fn: LossFn, *, backward: bool) -> None:
        """Run documents of several LoRAs together, and add the gradients of the summed loss of each to its LoRA.

        Args:
            batch: documents with the fields `lora` [B], an index into `names`, and `loss_mask` [T].
            names: LoRAs of the pool.
            loss_fn: receives the documents of one LoRA at a time, and returns the sum of their losses.
            backward: whether to compute gradients.

        Raises:
            BatchError: a token outside of the vocabulary, or a document longer than a micro-batch. No gradient changes.
        """
        engine, built = self._engine, self._engine.built
        runner = built.runner
        assert isinstance(runner, MicroBatchRunner)
        if engine.device.type == "cpu":
            adjust_threads()
        _, parts = micro_batches(
            batch,
            engine.config.max_tokens_per_mb,
            engine.args.vocab_size,
            share_prefixes=built.share_prefixes,
            every_token=bool(engine.args.expert_layers),
            sort=built.sort_documents,
            n_loras=len(names),
            image_format=engine.args.image_format,
        )
        groups: dict[int | None, LossGroup] = {index: LossGroup(1.0, name) for index, name in enumerate(names)}
        loss = BatchLoss(loss_fn, _one, 1.0, 1.0, groups)
        runner = replace(runner, planner=replace(runner.planner, lora_names=tuple(names)))
        if engine.model.training != backward:  # a walk over all modules of all LoRAs
            engine.model.train(backward)
        if not backward:
            runner.evaluate(parts, loss)
            return
        # An error in the middle leaves the gradients of earlier calls as they were.
        parameters = [parameter for name in names for parameter in self[name].parameters.values()]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            runner.accumulate(parts, loss, reduce_every=False)
        except BaseException:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            raise
        for parameter, grad in zip(parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        heap.trim_heap_if_grown("training")

    def step(self, name: str, settings: AdamStep) -> float:
        """Take an AdamW step on the accumulated gradients of a LoRA, and clear them; return their norm.

        Raises:
            UserError: there is no gradient.
            NotFiniteError: the gradient is not finite; no weight or moment has changed, and the gradient is cleared.
        """
        lora = self[name]
        if all(parameter.grad is None for parameter in lora.parameters.values()):
            raise UserError("there is no gradient to step on; call forward_backward before each optim_step")
        norm = float(gradient_norm(lora.parameters.values()))
        if not math.isfinite(norm):
            self.clear_gradients(name)
            raise NotFiniteError(
                "the gradient is not finite, so the step was skipped and the gradient cleared; lower the learning rate "
                "or look for extreme loss inputs"
            )
        clip_gradients(lora.parameters.values(), norm, settings.max_grad_norm or None)
        for group in lora.optimizer.param_groups:
            group |= {
                "lr": settings.lr,
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
            }
        lora.optimizer.step()
        self.clear_gradients(name)
        return norm

    def clear_gradients(self, name: str) -> None:
        """Drop the accumulated gradients of a LoRA."""
        for parameter in self[name].parameters.values():
            parameter.grad = None

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a LoRA by their name in a model with only this LoRA; not copies."""
        return {single: parameter.detach() for single, parameter in self[name].parameters.items()}

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer state of a LoRA as PARAMETER:KEY; empty before the first step. Not copies."""
        lora = self[name]
        return {
            f"{single}:{key}": value
            for single, parameter in lora.parameters.items()
            for key, value in lora.optimizer.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def load(self, name: str, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Copy `weights` and `moments` to a LoRA, and clear its gradients; empty moments reset the optimizer."""
        lora = self[name]
        for single, parameter in lora.parameters.items():
            parameter.copy_(weights[single])
        self.clear_gradients(name)
        lora.optimizer.state.clear()
        if not moments:
            return
        for single, parameter in lora.parameters.items():
            state = {key: torch.empty_like(parameter).copy_(moments[f"{single}:{key}"]) for key in MOMENTS}
            step = moments[f"{single}:step"].to(parameter.device, torch.float32, copy=True)
            lora.optimizer.state[parameter] = {"step": step, **state}


def _one(batch: PackedBatch) -> Tensor:
    """Return the denominator of a summed loss."""
    return torch.ones(())
