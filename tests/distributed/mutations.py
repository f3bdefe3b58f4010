"""Mistakes that other engines made, planted on the ranks; each names the case of the matrix that catches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import archon.engine.optim
from archon.engine.pipeline_step import PipelineRunner
from archon.engine.plan import ForwardPlan
from archon.engine.train_step import MicroBatchRunner, total_weight
from archon.models.layers.head import IGNORE_INDEX
from archon.models.layers.moe import MoE
from archon.parallel import comm
from archon.parallel.comm import Group
from archon.parallel.layout import parse_layout
from archon.parallel.ranks import Ranks
from tests.distributed.cases import DENSE, MODELS, Case
from tests.distributed.matrix import run_case

Plant = Callable[[Case], Any]
"""A context manager within which the mistake is made."""


def _without_partial(target: str, shape: tuple[int, ...]) -> Plant:
    """`local` as `target` sees it, without the sum over ranks for replicated parameters of a shape."""

    def local(parameter: Tensor | None) -> Tensor | None:
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == shape:
            return parameter.to_local(grad_placements=list(parameter.placements))
        return comm.local(parameter)

    return lambda case: mock.patch(target, local)


def _norm_over(dim_names: frozenset[str], mesh_name: str) -> Plant:
    """The squares of what is sharded over `dim_names` summed over another group."""

    def plant(case: Case) -> Any:
        dims = parse_layout(case.layout).dims()
        wrong, holders = Group.from_mesh(dims.get_mesh(mesh_name)), archon.engine.optim._shard_groups

        def mistaken(grad: Tensor) -> tuple[Group, ...]:
            assert isinstance(grad, DTensor)
            names = grad.device_mesh.mesh_dim_names or ()
            groups = holders(grad)
            return (wrong,) if dim_names & set(names) else groups

        return mock.patch.object(archon.engine.optim, "_shard_groups", mistaken)

    return plant


def _shared_expert_tp_times(case: Case) -> Any:
    """In the gradient alone: the loss looks normal."""
    forward = MoE.forward

    def mistaken(self: MoE, x: Tensor, *further: Any) -> Any:
        out, stats = forward(self, x, *further)
        assert self.shared_experts is not None and self.shared_experts.tp is not None
        extra = self.shared_experts(x) * (self.shared_experts.tp.size - 1)
        return out + extra - extra.detach(), stats

    return mock.patch.object(MoE, "forward", mistaken)


@contextmanager
def _denominator_of_each_rank(case: Case) -> Iterator[None]:
    def own(parts: Any, loss_weight_fn: Any, ranks: Ranks, device: torch.device) -> float:
        return total_weight(parts, loss_weight_fn, Ranks(), device)

    with mock.patch("archon.engine.engine.total_weight", own):
        yield


def _idle_micro_batches_scored(case: Case) -> Any:
    def mistaken(self: MicroBatchRunner, plan: ForwardPlan, hidden: Tensor | None = None) -> Tensor:
        labels = plan.head_input(plan.documents.loss_labels(), IGNORE_INDEX)
        scores: Any = self.forward(replace(plan, labels=labels, label_rows=None), hidden=hidden)
        return scores.logprobs.sum() * 1e-3

    return mock.patch.object(MicroBatchRunner, "run_idle", mistaken)


def _head_of_a_pipeline_decayed(case: Case) -> Any:
    groups = archon.engine.optim.decay_groups

    def mistaken(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        decayed, plain = groups(model)
        head = dict(model.named_parameters()).get("output.weight")
        return [*decayed, *(p for p in plain if p is head)], [p for p in plain if p is not head]

    return mock.patch.object(archon.engine.optim, "decay_groups", mistaken)


def _gradients_averaged(case: Case) -> Any:
    from torch.distributed.fsdp import FSDPModule

    factor = FSDPModule.set_gradient_divide_factor
    ranks = parse_layout(case.layout).dims().fsdp_gradient_divide_factor
    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, _: factor(self, float(ranks)))


def _gradients_summed(user: str) -> Plant:
    """What every rank computes alike, gathered as if each rank used it in another way."""
    return lambda case: mock.patch(f"{user}.all_gather_replicated", comm.all_gather)


def _nothing(target: Any, name: str) -> Plant:
    return lambda case: mock.patch.object(target, name, return_value=None)


def _padding_counted(case: Case) -> Any:
    forward = MoE.forward
    return mock.patch.object(MoE, "forward", lambda self, x, valid_mask, *further: forward(self, x, None, *further))


def _loss_of_balance_by_rank(case: Case) -> Any:
    from archon.models.layers.moe import load_balancing_loss

    return mock.patch("archon.engine.train_step.load_balancing_loss", lambda stats, groups: load_balancing_loss(stats))


@dataclass(frozen=True)
class Mutation:
    """A mistake, the case that catches it, and a tensor that must be found wrong."""

    mistake: str
    plant: Plant
    case: str
    wrong: str


_GATE = (MODELS["moe"]["num_experts"], DENSE["hidden_size"])
_HEAD_NORM = (DENSE["head_dim"],)
_AUX = "router_aux_loss_coef=0.1"
_PIPE = "pipeline={'schedule': '1f1b'}"

# Two mirrored chunks of each document: the ranks' totals differ, and padding evens them.
_PADDED = (
    "tied_moe-critic-c2e2-float64-context_parallel=allgather-"
    "activation_checkpoint={'mode': 'selective', 'selective': 2}"
    f"-gradient_reduction=per_microbatch-reshard_after_forward=never-{_AUX}"
)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "no Partial on the router gate",
        _without_partial("archon.models.layers.linear.local", _GATE),
        "moe-t2-float64",
        "grad.layers.0.moe.router.gate.weight",
    ),
    Mutation(
        "no Partial on the router gate, with EP over TP",
        _without_partial("archon.models.layers.linear.local", _GATE),
        "moe-t2e2-float64",
        "grad.layers.0.moe.router.gate.weight",
    ),
    Mutation(
        "QK-norm gradients not summed over tp",
        _without_partial("archon.models.layers.norm.local", _HEAD_NORM),
        "dense-t2-float64",
        "grad.layers.0.attention.q_norm.weight",
    ),
    Mutation(
        "norm gradients not summed over tp",
        _without_partial("archon.models.layers.norm.local", (DENSE["hidden_size"],)),
        "dense-t2-float64",
        "grad.layers.0.ffn_norm.weight",
    ),
    Mutation(
        "gradient norm over dp in place of dp_cp",
        _norm_over(frozenset({"dp_shard_cp"}), "dp"),
        "dense-c2-float64-context_parallel=allgather",
        "norm",
    ),
    Mutation(
        "gradient norm of experts over the ranks that shard dense weights",
        _norm_over(frozenset({"edp", "ep"}), "dp_shard_cp"),
        "moe-t2e2-float64",
        "norm",
    ),
    Mutation(
        "gradient norm of a pipeline's ranks apart",
        lambda case: mock.patch(
            "archon.engine.engine.gradient_norm",
            lambda parameters, stages: archon.engine.optim.gradient_norm(parameters),
        ),
        f"tied-p2-float64-{_PIPE}",
        "norm",
    ),
    Mutation("shared expert counted tp times", _shared_expert_tp_times, "shared-t2-float64", "shared_experts.w1"),
    Mutation("loss denominator of each rank", _denominator_of_each_rank, "dense-d2-float64", "loss"),
    Mutation("gradients averaged over ranks", _gradients_averaged, "dense-d2-float64", "grad.norm.weight"),
    Mutation("idle micro-batches scored", _idle_micro_batches_scored, "dense-d2-float64", "grad.output.weight"),
    Mutation(
        "tied gradients of a pipeline's ends not summed",
        _nothing(PipelineRunner, "_reduce_tied"),
        f"tied-p2-float64-{_PIPE}",
        "grad.tok_embeddings.weight",
    ),
    Mutation(
        "weight decay on the head of a tied pipeline",
        _head_of_a_pipeline_decayed,
        f"tied-p2-float64-{_PIPE}",
        "weight.tok_embeddings.weight",
    ),
    Mutation(
        "gathered log-probabilities counted cp times",
        _gradients_summed("archon.parallel.context"),
        "dense-c2-float64-context_parallel=allgather",
        "grad.output.weight",
    ),
    Mutation(
        "gradients of keys from other ranks' queries lost",
        lambda case: mock.patch("archon.models.attention.context_parallel.all_gather", comm.all_gather_replicated),
        "dense-c2-float64-context_parallel=allgather",
        "grad.layers.0.attention.wk.weight",
    ),
    Mutation(
        "values of a critic counted tp times",
        _gradients_summed("archon.models.base"),
        "dense-critic-t2-float64",
        "grad.score.weight",
    ),
    Mutation("padding counted by the router", _padding_counted, _PADDED, "moe.router.gate.weight"),
    Mutation(
        "balancing loss of each rank's tokens",
        _loss_of_balance_by_rank,
        f"moe-t2e2-float32-{_AUX}",
        "grad.layers.0.moe.router.gate.weight",
    ),
)


def run_mutated(case: Case, folder: str, mistake: str) -> dict[str, float]:
    """On every rank: the case, with the mistake made."""
    mutation = next(each for each in MUTATIONS if each.mistake == mistake)
    with mutation.plant(case):
        return run_case(case, folder)
