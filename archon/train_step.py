"""One pass over a batch: micro-batches, one denominator for all of them, sums of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from archon.batch import PackedBatch, pack, split
from archon.loss import LossFn, LossWeightFn, Metrics, WeightedTokenLoss
from archon.models.attention.backend import AttnType
from archon.models.attention.meta import PackedAttention
from archon.models.head import TokenScores, WeightedLoss
from archon.parallel.fsdp import reshard, set_gradient_reduction
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

    def read(self, **scalars: Tensor) -> dict[str, float]:
        """Every scalar and every sum / count, in one transfer from the device; a metric that counted nothing is left
        out."""
        device = next(iter(scalars.values())).device
        tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]
        values = torch.stack([x.detach().to(device, torch.float64).reshape(()) for x in tensors]).tolist()
        result = dict(zip(scalars, values, strict=False))
        sums, counts = values[len(scalars) :][: len(self.sums)], values[len(scalars) + len(self.sums) :]
        result.update({name: s / c for name, s, c in zip(self.sums, sums, counts, strict=True) if c})
        return result


def micro_batches(batch: Batch, max_tokens: int, vocab_size: int) -> tuple[PackedBatch, list[PackedBatch]]:
    """The whole batch as one pack and its micro-batches; a token outside the vocabulary is a `BatchError`."""
    packed = batch.to(torch.device("cpu")) if isinstance(batch, PackedBatch) else pack(batch)
    low, high = packed.tokens.aminmax()
    if low < 0 or high >= vocab_size:
        wrong = int(low if low < 0 else high)
        raise BatchError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size}; is it this model's tokenizer?"
        )
    return packed, split(packed, max_tokens)


def total_weight(parts: Sequence[PackedBatch], loss_weight_fn: LossWeightFn) -> float:
    """The one denominator of a batch: the units of all its micro-batches."""
    total = float(sum(loss_weight_fn(mb) for mb in parts))
    if not total > 0:
        raise BatchError(f"the batch has nothing to train: its loss weight is {total:g} (is loss_mask all zero?)")
    return total


@dataclass(frozen=True)
class Forward:
    """Runs a model on micro-batches and applies a loss to what comes out."""

    model: nn.Module
    device: torch.device
    attn_type: AttnType
    is_critic: bool

    def call(self, mb: PackedBatch, **head: object) -> Tensor | TokenScores | WeightedLoss:
        """The model's forward on a micro-batch that is on the device; `head` is what the head is asked for."""
        meta = PackedAttention(mb.cu_seqlens, mb.max_seqlen, self.attn_type, lengths=mb.lengths)
        return self.model(mb.tokens, mb.positions, mb.cu_seqlens, mb.max_seqlen, meta, **head)

    def loss(self, mb: PackedBatch, loss_fn: LossFn, temperature: float) -> tuple[Tensor, Metrics]:
        """The summed loss of a micro-batch on the device, with gradient, and its metrics.

        Tokens whose `loss_mask` is 0 are not scored: their logprob and entropy are 0.
        """
        if self.is_critic:
            return _with_metrics(loss_fn(_tensor(self.call(mb)), None, mb))
        labels = mb.scored_labels()
        if isinstance(loss_fn, WeightedTokenLoss):
            weights = loss_fn.token_weights(mb)
            fused = self.call(mb, labels=labels, temperature=temperature, entropy=False, loss_weights=weights)
            assert isinstance(fused, WeightedLoss)
            return fused.loss, loss_fn.metrics(fused.logprobs, mb)
        wants_entropy = getattr(loss_fn, "needs_entropy", True)
        scores = self.call(mb, labels=labels, temperature=temperature, entropy=wants_entropy)
        assert isinstance(scores, TokenScores)
        return _with_metrics(loss_fn(scores.logprobs, scores.entropy, mb))

    def accumulate(
        self,
        parts: Sequence[PackedBatch],
        loss_fn: LossFn,
        denominator: float,
        temperature: float,
        reduce_every: bool,
    ) -> tuple[Tensor, MetricSums]:
        """Add the gradient of Σ loss / denominator to the parameters; give back that loss, detached, and the
        metrics."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()
        for index, mb in enumerate(parts):
            set_gradient_reduction(self.model, reduce_every or index == len(parts) - 1)
            loss, extra = self.loss(mb.to(self.device), loss_fn, temperature)
            if not loss.requires_grad:
                raise ConfigError(f"{_name(loss_fn)} returned a loss without gradient; was it detached?")
            (loss / denominator).backward()
            total += loss.detach() / denominator
            metrics.add(extra)
        return total, metrics

    @torch.no_grad()
    def evaluate(
        self, parts: Sequence[PackedBatch], loss_fn: LossFn, denominator: float, temperature: float
    ) -> tuple[Tensor, MetricSums]:
        """Σ loss / denominator and the metrics, without gradient."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()
        with whole_afterwards(self.model):
            for mb in parts:
                loss, extra = self.loss(mb.to(self.device), loss_fn, temperature)
                total += loss / denominator
                metrics.add(extra)
        return total, metrics

    @torch.no_grad()
    def scores(self, mb: PackedBatch, temperature: float, entropy: bool, only_trained: bool) -> list[Tensor]:
        """Logprobs [T] and, if asked for, entropies [T] of every token, or of those that `loss_mask` marks; values of
        a critic."""
        mb = mb.to(self.device)
        if self.is_critic:
            return [_tensor(self.call(mb))]
        labels = mb.scored_labels() if only_trained else mb.labels
        scores = self.call(mb, labels=labels, temperature=temperature, entropy=entropy)
        assert isinstance(scores, TokenScores)
        return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]


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
