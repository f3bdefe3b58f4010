"""Training step: run micro-batches forward and backward with one loss denominator for all.

Each micro-batch takes five phases: plan, model inputs in compute order, model, scores, back to pack order and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import LossFn, LossWeightFn, WeightedTokenLoss
from archon.engine.metrics import MetricSums
from archon.engine.micro_batch import MicroBatch
from archon.engine.plan import ForwardPlan, ForwardPlanner, ScoredTokens
from archon.engine.router_balance import RouterLoad
from archon.models.base import BaseArchonModel
from archon.models.layers.head import IGNORE_INDEX, TokenScores, WeightedLoss
from archon.models.layers.moe import load_balancing_loss
from archon.parallel.comm import all_reduce, all_reduce_replicated
from archon.parallel.fsdp import reshard, set_gradient_reduction
from archon.parallel.phase import phase
from archon.parallel.ranks import Ranks
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError, ConfigError


@dataclass(frozen=True)
class LossGroup:
    """Documents with one loss denominator: the whole batch, or the documents of one LoRA.

    Attributes:
        weight: the loss weight of the documents on all ranks, the denominator of their loss.
        name: the LoRA; None for the whole batch.
        tokens: the tokens of the documents of a LoRA on all ranks.
    """

    weight: float
    name: str | None = None
    tokens: float = 0.0

    @property
    def prefix(self) -> str:
        """The prefix of the group's metrics."""
        return "" if self.name is None else f"{self.name}/"


@dataclass(frozen=True)
class BatchLoss:
    """Loss of a batch: the sum over groups of Σ `fn` / weight of the group, over all micro-batches.

    Attributes:
        fn: the loss function.
        weight_fn: counts the units that `fn` sums.
        temperature: the temperature of log-probabilities.
        denominator: the loss weight of the whole batch.
        mtp_weights: the factor on the summed cross-entropy of each MTP layer.
        groups: the groups by LoRA index; None is the index of the whole batch.
    """

    fn: LossFn
    weight_fn: LossWeightFn
    temperature: float
    denominator: float
    groups: Mapping[int | None, LossGroup]
    mtp_weights: tuple[float, ...] = ()

    @property
    def lora_groups(self) -> list[LossGroup]:
        """The groups of a multi-LoRA model."""
        return [group for group in self.groups.values() if group.name is not None]

    def sums(self, device: torch.device) -> MetricSums:
        """Return empty metric sums."""
        return MetricSums(device, [f"{group.prefix}loss" for group in self.lora_groups])


def total_weight(
    parts: Sequence[MicroBatch], loss_weight_fn: LossWeightFn, ranks: Ranks, device: torch.device
) -> float:
    """Return the loss weight of all micro-batches of all ranks; raise BatchError for 0."""
    total = float(sum(loss_weight_fn(mb.documents) for mb in parts))
    if ranks.dp.size > 1:
        total = float(all_reduce(torch.tensor(total, dtype=torch.float64, device=device), ranks.dp))
    if not total > 0:
        raise BatchError(f"the batch has nothing to train: its loss weight is {total:g} (is loss_mask all zero?)")
    return total


def mtp_weights(
    parts: Sequence[MicroBatch], n_layers: int, loss_weight: float, ranks: Ranks, device: torch.device
) -> tuple[float, ...]:
    """Return loss_weight / K / (trained labels on all ranks) of each of the K MTP layers; 0 for a layer without labels.

    DeepSeek-AI 2024, arXiv:2412.19437, equations 24 and 25.
    """
    if not n_layers:
        return ()
    counts = torch.zeros(n_layers, dtype=torch.float64, device=device)
    for mb in parts:
        counts += torch.tensor(_mtp_label_counts(mb, n_layers), dtype=torch.float64, device=device)
    totals = all_reduce(counts, ranks.dp) if ranks.dp.size > 1 else counts
    return tuple(loss_weight / n_layers / total if total else 0.0 for total in totals.tolist())


def _mtp_label_counts(mb: MicroBatch, n_layers: int) -> list[int]:
    labels = (mb.documents.mtp_targets(layer)[1] for layer in range(1, n_layers + 1))
    return [int((layer_labels != IGNORE_INDEX).sum()) for layer_labels in labels]


def lora_groups(
    parts: Sequence[MicroBatch],
    names: Sequence[str],
    loss_weight_fn: LossWeightFn,
    ranks: Ranks,
    device: torch.device,
) -> dict[int | None, LossGroup]:
    """Return the loss group of each LoRA with a document on any rank, by its index in `names`.

    Raises:
        BatchError: a LoRA has documents with nothing to train.
    """
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    for mb in parts:
        for index, documents in mb.documents.by_lora():
            weight = float(loss_weight_fn(documents))
            totals[:, index] += torch.tensor([weight, documents.n_tokens], dtype=torch.float64)
    if ranks.dp.size > 1:
        totals = all_reduce(totals.to(device), ranks.dp)
    groups: dict[int | None, LossGroup] = {
        index: LossGroup(weight, name, tokens)
        for index, (name, weight, tokens) in enumerate(zip(names, *totals.tolist(), strict=True))
        if tokens
    }
    for group in groups.values():
        if not group.weight > 0:
            raise BatchError(
                f"the documents of LoRA {group.name!r} have nothing to train: their loss weight is "
                f"{group.weight:g} (is loss_mask all zero?)"
            )
    return groups


@dataclass(frozen=True)
class MicroBatchRunner:
    """Step of micro-batches through a model, or through one pipeline stage.

    Attributes:
        model: the model or the stage.
        planner: plans the forward of a micro-batch on this rank.
        load: the expert counts of the model.
        router_aux_loss_coef: the coefficient of the load-balancing loss.
    """

    model: BaseArchonModel
    planner: ForwardPlanner
    load: RouterLoad
    router_aux_loss_coef: float = 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks of the layout."""
        return self.planner.ranks

    @property
    def loads(self) -> list[RouterLoad]:
        """The router loads of all stages on this rank."""
        return [self.load]

    def accumulate(
        self,
        parts: Sequence[MicroBatch],
        loss: BatchLoss,
        reduce_every: bool,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> MetricSums:
        """Add the gradient of the batch's loss to the parameters; return this rank's sums.

        The load-balancing loss is computed for each micro-batch and weighted by its fraction of the denominator.
        """
        sums = loss.sums(self.planner.device)
        rounds = self.ranks.all_reduce_max(len(parts), self.planner.device)
        for index, runs_vision_encoder in enumerate(self.planner.vision_flags(parts, rounds)):
            set_gradient_reduction(self.model, reduce_every or index == rounds - 1)
            is_idle = index >= len(parts)  # another rank has more micro-batches, and its collectives need this rank
            mb = parts[0 if is_idle else index]
            with phase("forward"):
                # 1. Plan the forward.
                plan = self.planner.plan(mb, "none" if is_idle else "trained", runs_vision_encoder, trains=True)
                value = self.run_idle(plan) if is_idle else self.loss(plan, loss, sums)
                del plan  # frees inputs that the backward pass does not need
            if not is_idle:
                if not value.requires_grad:
                    raise ConfigError(f"{_name(loss.fn)} returned a loss without gradient; was it detached?")
                self.load.add()
                if self.router_aux_loss_coef and self.model.router_stats:
                    aux = load_balancing_loss(self.model.router_stats, (self.ranks.cp, self.ranks.tp))
                    fraction = float(loss.weight_fn(mb.documents)) / loss.denominator
                    sums.add({"router_aux_loss": (aux.detach() * fraction, aux.new_full((), fraction))})
                    value = value + self.router_aux_loss_coef * fraction * aux
            with phase("backward"):
                if index == rounds - 1:
                    before_last_backward()
                value.backward()
            self.model.router_stats = []  # it would keep the graph until the next forward
        return sums

    def forward(
        self,
        plan: ForwardPlan,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
        loss_weights: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor | TokenScores | WeightedLoss, tuple[Tensor, ...]]:
        """Return the scores of all tokens of a micro-batch in pack order, on every rank, and the MTP layers' losses.

        Args:
            plan: the plan of the forward.
            temperature: the temperature of tokens without a temperature in the batch.
            entropy: whether to compute entropies.
            loss_weights: float [T]; compute the weighted loss in place of scores.
            hidden: the hidden states of the previous pipeline stage.
        """
        # 2. Bring the inputs of the model and of the head to compute order.
        inputs = plan.model_inputs(hidden)
        divisor = plan.documents.temperature(temperature)
        divisor = plan.head_input(divisor, 1.0) if isinstance(divisor, Tensor) else divisor
        weights = None if loss_weights is None else plan.head_input(loss_weights)
        # 3. and 4. Run the model and score its hidden states: one call, since FSDP gathers the head with the model.
        out = self.model(
            inputs,
            labels=plan.labels,
            label_rows=plan.label_rows,
            temperature=divisor,
            entropy=entropy,
            loss_weights=weights,
        )
        out, mtp_losses = out if plan.mtp is not None else (out, ())
        # 5. Gather the scores and bring them back to pack order.
        if plan.score_shard is not None:
            mtp_losses = tuple(all_reduce_replicated(loss, self.ranks.cp) for loss in mtp_losses)
        if isinstance(out, WeightedLoss):
            loss = out.loss if plan.score_shard is None else all_reduce_replicated(out.loss, self.ranks.cp)
            return WeightedLoss(loss, plan.in_pack_order(out.logprobs)), mtp_losses
        if isinstance(out, TokenScores):
            entropies = None if out.entropy is None else plan.in_pack_order(out.entropy)
            return TokenScores(plan.in_pack_order(out.logprobs), entropies), mtp_losses
        return plan.in_pack_order(out), mtp_losses

    def loss(
        self, plan: ForwardPlan, loss: BatchLoss, sums: MetricSums, *, hidden: Tensor | None = None, fuse: bool = True
    ) -> Tensor:
        """Return a micro-batch's term of the batch's loss; add it and its metrics to `sums`.

        Tokens outside `loss_mask` are not scored: their logprob and entropy are 0. `fuse` allows a fused loss, which
        cannot be differentiated in parts.
        """
        fn, documents, device = loss.fn, plan.documents, self.planner.device
        # The documents of each group, with the indices of their tokens in the micro-batch.
        groups: list[tuple[LossGroup, PackedBatch, Tensor | slice]] = []
        if None in loss.groups:
            groups.append((loss.groups[None], documents, slice(None)))
        else:
            for index, part in documents.by_lora():
                assert part.source is not None
                groups.append((loss.groups[index], part, to_device_async(part.source, device)))
        if self.planner.is_critic and isinstance(fn, WeightedTokenLoss):
            raise ConfigError(
                f"{_name(fn)} weights token log-probabilities, and a critic predicts values; use a loss of values"
            )
        if fuse and isinstance(fn, WeightedTokenLoss):
            token_weights = torch.zeros(documents.n_tokens, dtype=torch.float64, device=device)
            for group, part, rows in groups:
                token_weights[rows] = fn.token_weights(part).double() / group.weight
            fused, mtp_losses = self.forward(plan, loss.temperature, loss_weights=token_weights, hidden=hidden)
            assert isinstance(fused, WeightedLoss)
            for group, part, rows in groups:
                logprobs = fused.logprobs[rows].detach()
                sums.add(fn.metrics(logprobs, part), group.prefix)
                if group.name is not None:
                    sums.losses[f"{group.prefix}loss"] -= (token_weights[rows] * logprobs.double()).sum()
            sums.loss += fused.loss.detach()
            return self._add_mtp(fused.loss, mtp_losses, plan, loss, sums)
        entropy = not self.planner.is_critic and getattr(fn, "needs_entropy", True)
        scores, mtp_losses = self.forward(plan, loss.temperature, entropy=entropy, hidden=hidden)
        values, entropies = scores if isinstance(scores, TokenScores) else (_tensor(scores), None)
        total: Tensor | None = None
        for group, part, rows in groups:
            result = fn(values[rows], None if entropies is None else entropies[rows], part)
            value, metrics = result if isinstance(result, tuple) else (result, {})
            if not isinstance(value, Tensor) or value.ndim:
                got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"{_name(fn)} returned a loss of {got}; expected a scalar, the sum over tokens")
            value = value / group.weight
            sums.add(metrics, group.prefix)
            if group.name is not None:
                sums.losses[f"{group.prefix}loss"] += value.detach()
            total = value if total is None else total + value
        assert total is not None
        sums.loss += total.detach()
        return self._add_mtp(total, mtp_losses, plan, loss, sums)

    def _add_mtp(
        self, value: Tensor, mtp_losses: Sequence[Tensor], plan: ForwardPlan, loss: BatchLoss, sums: MetricSums
    ) -> Tensor:
        """Return `value` plus the weighted losses of the MTP layers; add their mean per token to `sums`."""
        if plan.mtp is None:
            return value
        labels = [plan.documents.mtp_targets(layer)[1] for layer in range(1, len(mtp_losses) + 1)]
        count = torch.stack([(layer_labels != IGNORE_INDEX).sum() for layer_labels in labels]).sum()
        sums.add({"mtp_loss": (torch.stack([x.detach() for x in mtp_losses]).sum(), count)})
        # The trunk's loss is added with factor 1, so its gradients are the same bits as without MTP layers.
        return value + sum(weight * x for weight, x in zip(loss.mtp_weights, mtp_losses, strict=True))

    def run_idle(self, plan: ForwardPlan, hidden: Tensor | None = None) -> Tensor:
        """Run a forward without scores; return a loss with zero gradients, for the collectives of other ranks."""
        out, mtp_losses = self.forward(plan, hidden=hidden)
        scores = out.logprobs if isinstance(out, TokenScores) else _tensor(out)
        return (scores * 0.0).sum() + sum(loss * 0.0 for loss in mtp_losses)

    def score(
        self, plan: ForwardPlan, temperature: float, entropy: bool, *, hidden: Tensor | None = None
    ) -> list[Tensor]:
        """Return logprobs [T] and, with `entropy`, entropies [T]; or a critic's values [T]."""
        out, _ = self.forward(plan, temperature, entropy=entropy, hidden=hidden)
        if not isinstance(out, TokenScores):
            return [_tensor(out)]
        return [out.logprobs] if out.entropy is None else [out.logprobs, out.entropy]

    @torch.no_grad()
    def evaluate(self, parts: Sequence[MicroBatch], loss: BatchLoss) -> MetricSums:
        """Return the sums of this rank's micro-batches, without gradient."""
        sums = loss.sums(self.planner.device)
        with self._forward_only(parts, "trained") as plans:
            for plan in plans:
                self.loss(plan, loss, sums)
        return sums

    @torch.no_grad()
    def scores(
        self, parts: Sequence[MicroBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """Return the scores of each micro-batch, only at `loss_mask` with `only_trained`; see `score`."""
        with self._forward_only(parts, "trained" if only_trained else "labeled") as plans:
            return [self.score(plan, temperature, entropy) for plan in plans]

    @contextmanager
    def _forward_only(self, parts: Sequence[MicroBatch], scored: ScoredTokens) -> Iterator[Iterator[ForwardPlan]]:
        """Yield plans for forwards without backward; then run idle forwards and free the gathered weights.

        The ranks exchange their numbers of micro-batches before the first forward: later, some ranks would still be
        gathering weights.
        """
        rounds = self.ranks.all_reduce_max(len(parts), self.planner.device)
        flags = self.planner.vision_flags(parts, rounds)
        try:
            yield (self.planner.plan(mb, scored, runs) for mb, runs in zip(parts, flags, strict=False))
            for runs_vision_encoder in flags[len(parts) :]:
                self.run_idle(self.planner.plan(parts[0], "none", runs_vision_encoder))
        finally:
            reshard(self.model)

    def read(self, sums: MetricSums, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """Read the metrics of all ranks; see `MetricSums.read`."""
        return sums.read(self.ranks, replicated, **scalars)


def _tensor(output: Tensor | TokenScores | WeightedLoss) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
