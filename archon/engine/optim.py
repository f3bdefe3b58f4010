"""Optimizers, gradient clipping and learning-rate schedules."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from archon.engine.low_bit_adamw import LowBitAdamW
from archon.engine.muon import Muon, is_matrix
from archon.parallel.comm import Group, all_reduce
from archon.parallel.fsdp import local_tensor
from archon.parallel.ranks import SOLO
from archon.parallel.torch_private import foreach_mul_, foreach_norm
from archon.schema.config import OptimizerConfig, SchedulerConfig
from archon.schema.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

# Elements summed in one float32 chunk on a CPU: torch adds sequentially, and a norm of 26M elements is 0.1 % too small.
NORM_CHUNK = 2**14


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    names: Collection[str] | None = None,
    *,
    compiled: bool = False,
    group: Group = SOLO,
) -> Optimizer:
    """Return AdamW [Loshchilov & Hutter 2019, algorithm 2] or `Muon`, with weight decay on matrices only.

    One fused kernel updates each group of AdamW. On a CPU it takes a fifth of the plain loop's time and a tenth of
    `foreach`. Narrow moments are updated by `LowBitAdamW`.

    Args:
        model: the model.
        config: the optimizer's kind and settings.
        names: the trained parameters; all by default.
        compiled: compile the update of narrow moments.
        group: all ranks of this rank's pipeline stage, for Muon.

    Raises:
        ConfigError: the moments are in 8 bits, and torchao cannot be imported.
    """
    decayed, plain = decay_groups(model)
    if names is not None:
        chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        decayed, plain = ([p for p in parameters if id(p) in chosen] for parameters in (decayed, plain))
    matrices = muon_matrices(model) if config.kind == "muon" else set()
    groups: dict[Any, dict[str, Any]] = {}
    for parameters, decay in ((decayed, config.weight_decay), (plain, 0.0)):
        for parameter in parameters:
            # A fused kernel takes parameters of one mesh, and experts have a separate mesh.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_muon = id(parameter) in matrices
            new_group: dict[str, Any] = {"params": [], "weight_decay": decay}
            if config.kind == "muon":
                new_group["matrices"] = by_muon
            groups.setdefault((decay, mesh, by_muon), new_group)["params"].append(parameter)
    betas = (config.beta1, config.beta2)
    if config.kind == "muon":
        return Muon(groups.values(), lr=config.lr, momentum=config.momentum, betas=betas, eps=config.eps, group=group)
    if config.moments != "float32":
        return LowBitAdamW(
            groups.values(), config.moments, lr=config.lr, betas=betas, eps=config.eps, compiled=compiled
        )
    return AdamW(list(groups.values()), lr=config.lr, betas=betas, eps=config.eps, fused=True)


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters with weight decay, and without: norms, biases, embeddings.

    A tied output matrix is the embedding and is not decayed. Each parameter appears once.
    """
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or getattr(module, "tied", False)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or id(parameter) in embeddings else decayed).append(parameter)
    return decayed, plain


def muon_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that Muon trains: matrices of layers, no heads, embeddings or convolutions."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear) or getattr(module, "role", None) == "experts"
        for parameter in module.parameters(recurse=False)
        if is_matrix(getattr(module, "role", None), parameter.shape)
    }


def gradient_norm(parameters: Iterable[nn.Parameter], stages: Group | None = None) -> Tensor:
    """Return the Euclidean norm of the whole model's gradient: float64 scalar, equal on every rank.

    Squares are summed over the ranks that shard a gradient, and not over replicas. Experts and dense weights have
    different ranks. `stages` are the ranks of a pipeline.
    """
    return gradient_norms([parameters], stages)[0]


@torch.no_grad()
def gradient_norms(owners: Sequence[Iterable[nn.Parameter]], stages: Group | None = None) -> Tensor:
    """Return the `gradient_norm` of n lists of parameters, float64 [n], with the collectives of one."""
    grads = [(owner, p.grad) for owner, parameters in enumerate(owners) for p in parameters if p.grad is not None]
    # 1. Collect the gradients sharded over the same ranks. Ranks are the key, not group names: a rank with two groups
    # of the same ranks would otherwise start an extra collective and hang.
    ranks_of = cache(lambda group: group.ranks)
    by_ranks: dict[tuple[tuple[int, ...], ...], tuple[list[Group], list[list[Tensor]]]] = {}
    for owner, grad in grads:
        groups = [group for group in _shard_groups(grad) if group.size > 1]
        _, parts = by_ranks.setdefault(tuple(map(ranks_of, groups)), (groups, [[] for _ in owners]))
        parts[owner] += _chunks(local_tensor(grad))
    # 2. Sum their squares, with one collective per group.
    if not grads:
        return torch.zeros(len(owners), dtype=torch.float64)
    totals = torch.zeros(len(owners), dtype=torch.float64, device=grads[0][1].device)
    for groups, parts in by_ranks.values():
        norms = torch.stack(foreach_norm([chunk for chunks in parts for chunk in chunks]))
        of_owners = norms.double().square().split([len(chunks) for chunks in parts])
        squares = torch.stack([of_owner.sum() for of_owner in of_owners])
        for group in groups:
            squares = all_reduce(squares, group)
        totals += squares
    return (totals if stages is None else all_reduce(totals, stages)).sqrt()


def _chunks(grad: Tensor) -> Sequence[Tensor]:
    """Split a CPU gradient into chunks of `NORM_CHUNK` elements."""
    return grad.flatten().split(NORM_CHUNK) if grad.is_cpu and grad.numel() > NORM_CHUNK else (grad,)


def _shard_groups(grad: Tensor) -> tuple[Group, ...]:
    """Return the groups over which a gradient is sharded."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    sharded = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(Group.from_process_group(mesh.get_group(dim)) for dim in sharded)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float | None) -> None:
    """Scale gradients by max_norm / norm if `norm` exceeds `max_norm` [Pascanu et al. 2013]."""
    if max_norm is None or norm <= max_norm:
        return
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    foreach_mul_(grads, max_norm / norm)


class SkippedSteps:
    """Counter of steps with non-finite gradients; stops a run after too many in a row."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def count(self, skipped: bool, step: int, max_in_a_row: int) -> None:
        """Record step number `step`; raise UserError after `max_in_a_row` consecutive skips."""
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped:
            return
        self.total += 1
        logger.warning("step %d skipped: its gradient norm is not finite (%d so far)", step, self.total)
        if self._in_a_row >= max_in_a_row:
            raise UserError(
                f"the gradient norm was not finite in {self._in_a_row} steps in a row, up to step {step}; "
                "lower optimizer.lr, or look for infinite values in the data or the weights"
            )


def learning_rate_factor(step: int, total_steps: int | None, config: SchedulerConfig) -> float:
    """Return the fraction of the peak learning rate at optimizer step `step` (from 0).

    Warm-up of w steps: (step + 1) / w, from just above 0 to 1 at step w - 1; no step has rate 0. Afterwards,
    with p = (step - w) / (total - w) capped at 1 and r = `min_lr_ratio`: constant 1; linear 1 - (1 - r) p; cosine r +
    (1 - r) (1 + cos πp) / 2 [Loshchilov & Hutter 2017]; wsd 1 until the last `decay_steps` steps, and linear over them
    [Hu et al. 2024, arXiv:2404.06395].
    """
    warmup = _steps(config.warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.kind == "constant":
        return 1.0
    assert total_steps is not None  # check_schedule refuses a decaying schedule without an end
    first = total_steps - _steps(config.decay_steps, total_steps) if config.kind == "wsd" else warmup
    progress = min(1.0, max(0, step - first) / max(1, total_steps - first))
    if config.kind in ("linear", "wsd"):
        return 1.0 - (1.0 - config.min_lr_ratio) * progress
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check_schedule(config: SchedulerConfig, total_steps: int | None) -> None:
    """Raise ConfigError for a decaying schedule without an end or without a decay step."""
    if config.kind == "constant" and isinstance(config.warmup_steps, int):
        return
    if total_steps is None:
        setting = f"kind = {config.kind}" if config.kind != "constant" else f"warmup_steps = {config.warmup_steps}"
        raise ConfigError(f"scheduler.{setting} needs total_steps; pass it to initialize(total_steps=…)")
    if config.kind == "constant":
        return
    warmup, decay = _steps(config.warmup_steps, total_steps), _steps(config.decay_steps, total_steps)
    if config.kind == "wsd" and warmup + decay > total_steps:
        raise ConfigError(
            f"scheduler.warmup_steps = {config.warmup_steps} and scheduler.decay_steps = {config.decay_steps} are more "
            f"than the {total_steps} steps; lower them, or set shares of all steps, such as 0.05 and 0.2"
        )
    if warmup >= total_steps:
        raise ConfigError(
            f"scheduler.warmup_steps = {config.warmup_steps} leaves none of the {total_steps} steps to decay in; "
            "lower it, or set a share of all steps, such as scheduler.warmup_steps=0.05"
        )


def _steps(steps: float, total_steps: int | None) -> int:
    """Return a number of steps, which may be configured as a share of all steps."""
    if isinstance(steps, int):
        return steps
    assert total_steps is not None  # see check_schedule
    return round(steps * total_steps)


class LRSchedule:
    """Learning-rate schedule of an optimizer; call `step` after each optimizer step."""

    def __init__(self, optimizer: Optimizer, peak_lr: float, config: SchedulerConfig, total_steps: int | None) -> None:
        check_schedule(config, total_steps)
        self._optimizer = optimizer
        self._peak_lr = peak_lr
        self._config = config
        self._total_steps = total_steps
        self._position = 0
        self._apply()

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._peak_lr * learning_rate_factor(self._position, self._total_steps, self._config)

    def step(self) -> None:
        """Advance to the next optimizer step."""
        self._position += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return the position of the schedule."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` and set the learning rate."""
        self._position = int(state["position"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
