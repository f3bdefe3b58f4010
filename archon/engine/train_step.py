"""One pass over a batch: micro-batches, one denominator for all of them, sums of metrics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from archon.engine.batch import PackedBatch, pack, split, without_waiting
from archon.engine.loss import LossFn, LossWeightFn, Metrics, WeightedTokenLoss
from archon.engine.router_balance import RouterLoad
from archon.engine.token_split import TokenSplit
from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.base import BaseArchonModel
from archon.models.head import IGNORE_INDEX, TokenScores, WeightedLoss
from archon.models.layers.moe import load_balancing_loss
from archon.parallel.comm import all_reduce, all_reduce_replicated
from archon.parallel.context import SequenceShare
from archon.parallel.fsdp import reshard, set_gradient_reduction
from archon.parallel.phase import phase
from archon.parallel.ranks import Ranks
from archon.schema.errors import BatchError, ConfigError

Batch = Mapping[str, Tensor] | PackedBatch


@dataclass
class MetricSums:
    """Sums and counts of the metrics of a batch, kept on the device until they are read all at once."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metrics: Metrics) -> None:
        for name, (total, count) in metrics.items():
            self.sums[name] = self.sums.get(name, 0) + total.detach().double()
            self.counts[name] = self.counts.get(name, 0) + count.detach().double()

    def read(self, ranks: Ranks, alike: Mapping[str, Tensor] | None = None, **scalars: Tensor) -> dict[str, float]:
        """The sum over data-parallel ranks of every scalar, and of every sum / count, and scalars that are `alike` on
        all, in one transfer from the device; a metric that counted nothing is left out."""
        _require_same_names([*scalars, *self.sums], ranks)
        device = next(iter(scalars.values())).device
        tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]
        joined = torch.stack([x.detach().to(device, torch.float64).reshape(()) for x in tensors])
        alike = alike or {}
        same = [x.detach().to(device, torch.float64).reshape(1) for x in alike.values()]
        values = torch.cat([all_reduce(joined, ranks.dp), *same]).tolist()
        result = dict(zip(scalars, values, strict=False)) | dict(zip(alike, values[len(joined) :], strict=True))
        sums = values[len(scalars) :][: len(self.sums)]
        counts = values[len(scalars) + len(self.sums) : len(joined)]
        result.update({name: s / c for name, s, c in zip(self.sums, sums, counts, strict=True) if c})
        return result


def _require_same_names(names: Sequence[str], ranks: Ranks) -> None:
    """RuntimeError, on every rank, where data-parallel ranks would add up metrics of different names."""
    if ranks.dp.size == 1:
        return
    digest = float(zlib.crc32(" ".join(names).encode()))
    low, high = all_reduce(torch.tensor([-digest, digest], dtype=torch.float64), ranks.dp, "max").tolist()
    if -low != high:
        raise RuntimeError(
            f"data-parallel ranks report different metrics, this one {', '.join(names)}; "
            "a loss function must give the same names for every micro-batch"
        )


def micro_batches(batch: Batch, max_tokens: int, vocab_size: int) -> tuple[PackedBatch, list[PackedBatch]]:
    """The whole batch as one pack and its micro-batches, at least one; `BatchError` for a batch without a document, or
    with a token or label outside the vocabulary."""
    packed = batch.to(torch.device("cpu")) if isinstance(batch, PackedBatch) else pack(batch)
    if not packed.lengths:
        raise BatchError(
            "the batch has no document; give every data-parallel rank one, with a loss_mask of zeros where it is not "
            "to be trained"
        )
    for what, ids in (("token id", packed.tokens), ("label", packed.labels[packed.labels != IGNORE_INDEX])):
        low, high = ids.aminmax() if ids.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            wrong = int(low if low < 0 else high)
            raise BatchError(
                f"{what} {wrong} is outside the model's vocabulary of {vocab_size}; is it this model's tokenizer?"
            )
    return packed, split(packed, max_tokens)


def total_weight(
    parts: Sequence[PackedBatch], loss_weight_fn: LossWeightFn, ranks: Ranks, device: torch.device
) -> float:
    """The one denominator of a batch: the units of all micro-batches of all ranks."""
    total = float(sum(loss_weight_fn(mb) for mb in parts))
    if ranks.dp.size > 1:
        total = float(all_reduce(torch.tensor(total, dtype=torch.float64, device=device), ranks.dp))
    if not total > 0:
        raise BatchError(f"the batch has nothing to train: its loss weight is {total:g} (is loss_mask all zero?)")
    return total


@dataclass(frozen=True)
class Forward:
    """Runs a model on micro-batches and applies a loss to what comes out; on several ranks, each with its tokens."""

    model: BaseArchonModel
    device: torch.device
    tokens: TokenSplit
    is_critic: bool
    load: RouterLoad
    router_aux_loss_coef: float = 0.0
    input: Tensor | None = None
    least: int = 0

    @property
    def ranks(self) -> Ranks:
        return self.tokens.ranks

    def call(
        self,
        mb: PackedBatch,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = True,
        loss_weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | TokenScores | WeightedLoss:
        """The model's forward on a micro-batch that is on the device; what it gives speaks of all its tokens, on every
        rank. `rows`, on the CPU, are those that carry a label."""
        out, share = self._run(mb, labels, loss_weights, rows, temperature=temperature, entropy=entropy)
        if share is None:
            return out
        if isinstance(out, WeightedLoss):
            return WeightedLoss(all_reduce_replicated(out.loss, self.ranks.cp), share.gather(out.logprobs))
        if isinstance(out, TokenScores):
            return TokenScores(share.gather(out.logprobs), None if out.entropy is None else share.gather(out.entropy))
        return share.gather(out)

    def hidden(self, mb: PackedBatch) -> Tensor:
        """What a stage without a head passes on: [T / cp / tp, dim] of the padded micro-batch."""
        return _tensor(self._run(mb, None, None, None)[0])

    def with_input(self, hidden: Tensor | None, least: int) -> Forward:
        """The same for a pipeline stage: `hidden` in place of tokens, at least `least` tokens a context rank."""
        return replace(self, input=hidden, least=least)

    def _run(
        self,
        mb: PackedBatch,
        labels: Tensor | None,
        loss_weights: Tensor | None,
        rows: Tensor | None,
        **head: Any,
    ) -> tuple[Tensor | TokenScores | WeightedLoss, SequenceShare | None]:
        """The model on this rank's share of the tokens, and that share; None where it is all of them."""
        if not self.ranks.split_tokens and not self.least:
            meta: AttentionMeta = PackedAttention(
                mb.cu_seqlens, mb.max_seqlen, self.tokens.attn_type, mb.lengths, mb.shared
            )
            head.update(labels=labels, loss_weights=loss_weights)
            head["label_rows"] = None if rows is None else without_waiting(rows, self.device)
            return self.model(mb.tokens, mb.positions, mb.cu_seqlens, mb.max_seqlen, meta, **head), None
        share = self.tokens.share(mb.lengths, self.device, self.least)
        head["labels"] = None if labels is None else share.take(labels, IGNORE_INDEX)
        head["loss_weights"] = None if loss_weights is None else share.take(loss_weights)
        head["label_rows"] = None if rows is None else without_waiting(share.rows(rows), self.device)
        tokens = share.take(mb.tokens) if self.input is None else self.input
        positions, meta = share.positions(mb.positions), self.tokens.attention(share)
        return self.model(tokens, positions, mb.cu_seqlens, mb.max_seqlen, meta, **head), share

    def loss(
        self, mb: PackedBatch, loss_fn: LossFn, temperature: float, *, fuse: bool = True
    ) -> tuple[Tensor, Metrics]:
        """The summed loss of a micro-batch on the device, with gradient, and its metrics.

        Tokens whose `loss_mask` is 0 are not scored: their logprob and entropy are 0. A fused loss can be
        differentiated once and as a whole; `fuse` says whether it may be.
        """
        if self.is_critic:
            if isinstance(loss_fn, WeightedTokenLoss):
                raise ConfigError(
                    f"{_name(loss_fn)} weighs token log-probabilities, and a critic gives values; use a loss of values"
                )
            return _with_metrics(loss_fn(_tensor(self.call(mb)), None, mb))
        labels, rows = mb.scored_labels(), mb.labelled_rows(only_trained=True)
        if fuse and isinstance(loss_fn, WeightedTokenLoss):
            weights = loss_fn.token_weights(mb)
            fused = self.call(mb, labels, temperature, entropy=False, loss_weights=weights, rows=rows)
            assert isinstance(fused, WeightedLoss)
            return fused.loss, loss_fn.metrics(fused.logprobs, mb)
        wants_entropy = getattr(loss_fn, "needs_entropy", True)
        scores = self.call(mb, labels, temperature, entropy=wants_entropy, rows=rows)
        assert isinstance(scores, TokenScores)
        return _with_metrics(loss_fn(scores.logprobs, scores.entropy, mb))

    def accumulate(
        self,
        parts: Sequence[PackedBatch],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        denominator: float,
        temperature: float,
        reduce_every: bool,
    ) -> tuple[Tensor, MetricSums]:
        """Add the gradient of Σ loss / denominator to the parameters; give back that loss, detached, and the
        metrics, both of this rank's micro-batches.

        The auxiliary loss of a mixture of experts is that of each micro-batch, weighted by its share of the
        denominator.
        """
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()
        rounds = self.ranks.most(len(parts), self.device)
        for index in range(rounds):
            set_gradient_reduction(self.model, reduce_every or index == rounds - 1)
            if index >= len(parts):  # another rank has more; what all ranks do together needs this one too
                with phase("forward"):
                    nothing = self.idle(parts[0].to(self.device))
                with phase("backward"):
                    nothing.backward()
                continue
            mb = parts[index]
            with phase("forward"):
                loss, extra = self.loss(mb.to(self.device), loss_fn, temperature)
            if not loss.requires_grad:
                raise ConfigError(f"{_name(loss_fn)} returned a loss without gradient; was it detached?")
            loss = loss / denominator
            total += loss.detach()
            metrics.add(extra)
            self.load.add()
            if self.router_aux_loss_coef and self.model.router_stats:
                aux = load_balancing_loss(self.model.router_stats, (self.ranks.cp, self.ranks.tp))
                share = float(loss_weight_fn(mb)) / denominator
                loss = loss + self.router_aux_loss_coef * share * aux
                metrics.add({"router_aux_loss": (aux.detach() * share, aux.new_tensor(share))})
            with phase("backward"):
                loss.backward()
            self.model.router_stats = []  # it would keep the graph until the next forward
        return total, metrics

    def idle(self, mb: PackedBatch) -> Tensor:
        """A forward of which nothing is scored, as a loss: gradients of 0, and every collective of a real one."""
        if self.is_critic:
            out = _tensor(self.call(mb))
        else:
            nothing = torch.zeros(0, dtype=torch.int64)
            scores = self.call(mb, torch.full_like(mb.labels, IGNORE_INDEX), entropy=False, rows=nothing)
            assert isinstance(scores, TokenScores)
            out = scores.logprobs
        return (out * 0.0).sum()

    @torch.no_grad()
    def evaluate(
        self, parts: Sequence[PackedBatch], loss_fn: LossFn, denominator: float, temperature: float
    ) -> tuple[Tensor, MetricSums]:
        """Σ loss / denominator and the metrics of this rank's micro-batches, without gradient."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()
        rounds = self.ranks.most(len(parts), self.device)
        with whole_afterwards(self.model):
            for mb in parts:
                loss, extra = self.loss(mb.to(self.device), loss_fn, temperature)
                total += loss / denominator
                metrics.add(extra)
            self._idle_forwards(parts, rounds)
        return total, metrics

    @torch.no_grad()
    def scores(
        self, parts: Sequence[PackedBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """Logprobs [T] and, if asked for, entropies [T] of every token of each micro-batch, or of those that
        `loss_mask` marks; values of a critic."""
        rounds = self.ranks.most(len(parts), self.device)
        with whole_afterwards(self.model):
            results = [self.score(mb.to(self.device), temperature, entropy, only_trained) for mb in parts]
            self._idle_forwards(parts, rounds)
        return results

    def score(self, mb: PackedBatch, temperature: float, entropy: bool, only_trained: bool) -> list[Tensor]:
        """As `scores`, of one micro-batch that is on the device."""
        if self.is_critic:
            return [_tensor(self.call(mb))]
        labels = mb.scored_labels() if only_trained else mb.labels
        scores = self.call(mb, labels, temperature, entropy, rows=mb.labelled_rows(only_trained))
        assert isinstance(scores, TokenScores)
        return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]

    def _idle_forwards(self, parts: Sequence[PackedBatch], rounds: int) -> None:
        """As many forwards as this rank has fewer micro-batches than `rounds`, the most that any has. The ranks find
        that number before their first forward: afterwards one would ask while another still gathers weights."""
        for _ in range(rounds - len(parts)):
            self.idle(parts[0].to(self.device))

    @property
    def loads(self) -> list[RouterLoad]:
        """What the routers have chosen since these were cleared, one for each part of the model."""
        return [self.load]

    def read(self, sums: MetricSums, alike: Mapping[str, Tensor] | None = None, **scalars: Tensor) -> dict[str, float]:
        """See `MetricSums.read`."""
        return sums.read(self.ranks, alike, **scalars)


@contextmanager
def whole_afterwards(model: nn.Module) -> Iterator[None]:
    """Leave the model's parameters as the masters after forwards that no backward follows."""
    try:
        yield
    finally:
        reshard(model)


def _with_metrics(result: Tensor | tuple[Tensor, Metrics]) -> tuple[Tensor, Metrics]:
    return result if isinstance(result, tuple) else (result, {})


def _tensor(output: Tensor | TokenScores | WeightedLoss) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
