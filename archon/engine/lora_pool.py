"""LoRAs that are added and removed while an engine runs, over one frozen base.

`ArchonEngine.train_batch` accumulates gradients and steps in one call, on the LoRAs of its configuration. A training
service needs the two apart, on LoRAs that come and go: `LoRAPool.accumulate` adds gradients of documents of several
LoRAs, and `LoRAPool.step` updates one of them. Model, micro-batches and optimizer are the engine's.

On several ranks the base is sharded by the layout. A LoRA is small: every rank holds all of it with its moments, and
computes with the parts that belong to its shards of the base. The gradient of a LoRA is the sum over all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from archon.engine import heap
from archon.engine.batch import PackedBatch
from archon.engine.build import check_stages
from archon.engine.engine import ArchonEngine
from archon.engine.loss import LossFn
from archon.engine.low_bit_adamw import MOMENTS
from archon.engine.micro_batch import micro_batches
from archon.engine.optim import clip_gradients, gradient_norm
from archon.engine.pipeline_step import PipelineRunner
from archon.engine.threads import adjust_threads
from archon.engine.train_step import BatchLoss, LossGroup, MicroBatchRunner
from archon.models.lora.layers import MultiLoRALayer
from archon.models.lora.model import add_lora, initializers, lora_parameter_names, single_lora_names
from archon.models.lora.targets import LoRASize
from archon.parallel.fsdp import computed_region
from archon.parallel.mesh import default_group
from archon.parallel.pipeline import StagedModel
from archon.parallel.ranks import Ranks
from archon.schema.errors import ConfigError, NotFiniteError, UserError

_WEIGHT, _MOMENT, _GRADIENT = "weight:", "moment:", "gradient:"


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
        parameters: the trained parameters, by their name in a model with only this LoRA. Their gradients are complete.
        optimizer: AdamW over the parameters.
        parts: parameters of this rank's model and their regions. In one process they are `parameters`; on several
            ranks they are views of `parameters`, and their gradients are summed over ranks.
    """

    sizes: Mapping[str, LoRASize]
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    parts: Mapping[str, tuple[nn.Parameter, tuple[slice, ...]]]


class LoRAPool:
    """The LoRAs of an engine, which has neither an optimizer nor LoRAs of its configuration.

    On several ranks every method is a collective: all ranks call the methods in the same order.
    """

    def __init__(self, engine: ArchonEngine) -> None:
        config, built = engine.config, engine.built
        if config.optimizer is not None or config.lora is not None or config.is_critic:
            raise ConfigError("a LoRA pool needs an engine of an actor with optimizer: null and lora: null")
        self.world_size = built.layout.dims.world_size
        # An error in the middle of a step leaves swapped weights in place; on several ranks any error ends all of them.
        if built.layout.compiled or (built.swaps_weights and self.world_size == 1):
            raise ConfigError("a LoRA pool runs without compiled or offloaded blocks; set compile to false")
        self._engine, self._loras = engine, dict[str, PooledLoRA]()
        self._accumulated = set[str]()  # LoRAs with a gradient
        engine.model.requires_grad_(False)

    @property
    def ranks(self) -> Ranks:
        """The groups of this rank."""
        return self._engine.ranks

    @property
    def reports(self) -> bool:
        """True on the one rank that reports results, among the ranks with the same documents."""
        runner, ranks = self._engine.built.runner, self.ranks
        return (isinstance(runner, MicroBatchRunner) or runner.is_last) and ranks.cp.rank == ranks.tp.rank == 0

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors on the CPU; in one process the tensor itself."""
        if self.world_size == 1:
            return x
        x = x.to(self._engine.device)
        dist.all_reduce(x, group=default_group())
        return x.cpu()

    def __getitem__(self, name: str) -> PooledLoRA:
        return self._loras[name]

    def __contains__(self, name: str) -> bool:
        return name in self._loras

    def add(self, name: str, sizes: Mapping[str, LoRASize], seed: int) -> None:
        """Add a LoRA that starts at the base model, with the weights of a configured LoRA of the same `seed`.

        Its moments are allocated too, so that no later step lacks memory for them.
        """
        engine = self._engine
        check_stages(engine.built.layout, sizes)
        dtype = torch.promote_types(engine.built.builder.compute_dtype, torch.float32)
        # 1. Draw all of the LoRA, as a model with all layers does.
        meta, names = engine.meta_model(), single_lora_names(sizes, name)
        add_lora(meta, sizes, dtype, name)
        shapes = {key: parameter.shape for key, parameter in meta.named_parameters() if key in names}
        parameters = dict[str, nn.Parameter]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for long, fill in initializers(meta, "zero", name):
                drawn = torch.empty(shapes[long], dtype=dtype)
                fill(drawn)
                parameters[names[long]] = nn.Parameter(drawn.to(engine.device))
        # 2. Let the model compute with the parts that belong to its shards of the base.
        parts = dict[str, tuple[nn.Parameter, tuple[slice, ...]]]()
        for model in _models(engine):
            weights = dict(model.named_parameters())
            present = {matrix: size for matrix, size in sizes.items() if matrix in weights}
            with torch.device("meta"):
                add_lora(model, present, dtype, name)
            for matrix in present:
                *stack, rows, columns = computed_region(weights[matrix])
                regions = (*stack, slice(None), columns), (*stack, rows, slice(None))
                for long, region in zip(lora_parameter_names(matrix, name), regions, strict=True):
                    whole = parameters[names[long]]
                    part = whole if self.world_size == 1 else nn.Parameter(whole.detach()[region])
                    parts[names[long]] = part, region
                    owner, _, attribute = long.rpartition(".")
                    setattr(model.get_submodule(owner), attribute, part)
        optimizer = AdamW(list(parameters.values()), fused=True)
        self._loras[name] = PooledLoRA(sizes, parameters, optimizer, parts)
        self._reset_moments(name)

    def remove(self, name: str) -> None:
        """Remove a LoRA, its gradients and its moments."""
        del self._loras[name]
        self._accumulated.discard(name)
        for module in self._engine.model.modules():
            if isinstance(module, MultiLoRALayer) and name in module:
                del module[name]

    def accumulate(self, batch: PackedBatch, names: Sequence[str], loss_fn: LossFn, *, backward: bool) -> None:
        """Run documents of several LoRAs together, and add the gradients of the summed loss of each to its LoRA.

        Args:
            batch: this data-parallel rank's documents, at least one, with the fields `lora` [B], an index into `names`,
                and `loss_mask` [T].
            names: LoRAs of the pool.
            loss_fn: receives the documents of one LoRA at a time, and returns the sum of their losses.
            backward: whether to compute gradients.

        Raises:
            BatchError: a token outside of the vocabulary, or a document longer than a micro-batch. No gradient changes.
        """
        engine, built = self._engine, self._engine.built
        if engine.device.type == "cpu":
            adjust_threads()
        _, parts = self.ranks.require_on_all(
            lambda: micro_batches(
                batch,
                engine.config.max_tokens_per_mb,
                engine.args.vocab_size,
                share_prefixes=built.share_prefixes,
                every_token=bool(engine.args.expert_layers),
                sort=built.sort_documents,
                n_loras=len(names),
                image_format=engine.args.image_format,
            ),
            engine.device,
        )
        groups: dict[int | None, LossGroup] = {index: LossGroup(1.0, name) for index, name in enumerate(names)}
        loss = BatchLoss(loss_fn, _one, 1.0, 1.0, groups)
        runner = _with_loras(built.runner, tuple(names))
        if engine.model.training != backward:  # a walk over all modules of all LoRAs
            engine.model.train(backward)
        if not backward:
            runner.evaluate(parts, loss)
            return
        # Keep the gradients of earlier calls: an error in the middle must not change them, and a pipeline clears the
        # gradients of all its parameters.
        loras = [self[name] for name in dict.fromkeys((*names, *self._accumulated))]
        parameters = [part for lora in loras for part, _ in lora.parts.values()]
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
        self._accumulated.update(names)
        heap.trim_heap_if_grown("training")

    def step(self, name: str, settings: AdamStep) -> float:
        """Take an AdamW step on the accumulated gradients of a LoRA, and clear them; return their norm.

        Raises:
            UserError: there is no gradient.
            NotFiniteError: the gradient is not finite; no weight or moment has changed, and the gradient is cleared.
        """
        lora = self[name]
        if name not in self._accumulated:
            raise UserError("there is no gradient to step on; call forward_backward before each optim_step")
        self._complete_gradients(lora)
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
        self._accumulated.discard(name)
        for parameter in (*self[name].parameters.values(), *(part for part, _ in self[name].parts.values())):
            parameter.grad = None

    def _complete_gradients(self, lora: PooledLoRA) -> None:
        """Add the sums over ranks of the gradients of a LoRA's parts to the gradients of its parameters."""
        if self.world_size == 1:
            return
        parameters = lora.parameters
        like = next(iter(parameters.values()))
        flat = like.new_zeros(sum(parameter.numel() for parameter in parameters.values()))
        wholes = dict(zip(parameters, flat.split([p.numel() for p in parameters.values()]), strict=True))
        for single, (part, region) in lora.parts.items():
            if part.grad is not None:
                wholes[single].view_as(parameters[single])[region] = part.grad
                part.grad = None
        dist.all_reduce(flat, group=default_group())
        for single, parameter in parameters.items():
            grad = wholes[single].view_as(parameter)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a LoRA by their name in a model with only this LoRA; not copies."""
        return {single: parameter.detach() for single, parameter in self[name].parameters.items()}

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer state of a LoRA as PARAMETER:KEY; not copies."""
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
        if not moments:
            self._reset_moments(name)
            return
        for single, parameter in lora.parameters.items():
            for key, value in lora.optimizer.state[parameter].items():
                value.copy_(moments[f"{single}:{key}"])

    def _reset_moments(self, name: str) -> None:
        """Reset the moments and the step count of a LoRA to zero."""
        lora = self[name]
        for parameter in lora.parameters.values():
            zeros: dict[str, Tensor] = {key: torch.zeros_like(parameter) for key in MOMENTS}
            step = torch.zeros((), device=parameter.device)
            lora.optimizer.state[parameter] = {"step": step, **zeros}

    def state(self, name: str) -> dict[str, Tensor]:
        """Return everything that `restore` needs: weights, moments and gradients; not copies."""
        if name in self._accumulated:
            self._complete_gradients(self[name])
        tensors = {f"{_WEIGHT}{single}": x for single, x in self.weights(name).items()}
        tensors |= {f"{_MOMENT}{key}": x for key, x in self.moments(name).items()}
        for single, parameter in self[name].parameters.items():
            if parameter.grad is not None:
                tensors[f"{_GRADIENT}{single}"] = parameter.grad
        return tensors

    def restore(self, name: str, sizes: Mapping[str, LoRASize], state: Mapping[str, Tensor]) -> None:
        """Add a removed LoRA with its `state`."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}

        self.add(name, sizes, seed=0)
        try:
            self.load(name, part(_WEIGHT), part(_MOMENT))
            for single, grad in part(_GRADIENT).items():
                parameter = self[name].parameters[single]
                parameter.grad = grad.to(parameter.device, copy=True)
                self._accumulated.add(name)
        except BaseException:  # such as no memory: half of a LoRA must not answer the next request
            self.remove(name)
            raise


def _models(engine: ArchonEngine) -> list[nn.Module]:
    """Return the model, or this rank's pipeline stages."""
    return [*engine.model.stages] if isinstance(engine.model, StagedModel) else [engine.model]


def _with_loras(runner: MicroBatchRunner | PipelineRunner, names: tuple[str, ...]) -> MicroBatchRunner | PipelineRunner:
    """Return the runner for documents of these LoRAs."""
    planner = replace(runner.planner, lora_names=names)
    if isinstance(runner, MicroBatchRunner):
        return replace(runner, planner=planner)
    changed = copy.copy(runner)
    changed.planner = planner
    changed.stages = {number: replace(stage, planner=planner) for number, stage in runner.stages.items()}
    return changed


def _one(batch: PackedBatch) -> Tensor:
    """Return the denominator of a summed loss."""
    return torch.ones(())
