"""Run the micro-batches of a batch forward and backward, with one denominator for all, and sums their metrics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch, pack, split
from archon.engine.loss import LossFn, LossWeightFn, Metrics, WeightedTokenLoss
from archon.engine.router_balance import RouterLoad
from archon.models.args.base import ImageFormat
from archon.models.attention.context_parallel import ContextParallelAttention, GatheredAttention, UlyssesAttention
from archon.models.attention.meta import AttentionMeta, PackedAttention, PrefixAttention
from archon.models.attention.prefix.plan import SharedPrefixes, shared_prefixes
from archon.models.base import BaseArchonModel
from archon.models.layers.head import IGNORE_INDEX, TokenScores, WeightedLoss
from archon.models.layers.moe import load_balancing_loss
from archon.models.layers.routed_experts import UNKNOWN_EXPERT
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.vision.images import PackedImages
from archon.parallel.comm import all_reduce, all_reduce_replicated
from archon.parallel.context import ContextPlan, SequenceShard, TokenShard, contiguous_plan, zigzag_plan
from archon.parallel.fsdp import reshard, set_gradient_reduction
from archon.parallel.phase import phase
from archon.parallel.ranks import Ranks
from archon.parallel.transfer import to_device_async
from archon.schema.config import ContextParallelKind
from archon.schema.errors import BatchError, ConfigError

Batch = Mapping[str, Any] | PackedBatch


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch: Σ `fn` / `denominator` over all its micro-batches, of log-probabilities at `temperature`.

    Of a model with several adapters it is the sum of the losses of those in `per_lora`, each Σ `fn` over the
    adapter's documents alone / its own denominator.
    """

    fn: LossFn
    weight_fn: LossWeightFn
    denominator: float
    temperature: float
    per_lora: Mapping[int, LoRATotals] | None = None


@dataclass(frozen=True)
class LoRATotals:
    """What one of several adapters has in a batch: its name, and the loss weight and tokens of its documents on all
    ranks."""

    name: str
    weight: float
    tokens: float


class MetricSums:
    """The loss of a batch, and the sums and counts of its metrics: on the device until all are read at once."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}
        """`NAME/loss` of each adapter of a model with several."""

    @classmethod
    def empty(cls, loss: BatchLoss, device: torch.device) -> MetricSums:
        """Return empty sums of a batch."""
        sums = cls(device)
        for lora_share in (loss.per_lora or {}).values():
            sums.losses[f"{lora_share.name}/loss"] = torch.zeros_like(sums.loss)
        return sums

    def add(self, metrics: Metrics) -> None:
        for name, (total, count) in metrics.items():
            self.sums[name] = self.sums.get(name, 0) + total.detach().double()
            self.counts[name] = self.counts.get(name, 0) + count.detach().double()

    def read(self, ranks: Ranks, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """Return the sum over data-parallel ranks of the loss and every scalar, sum / count of every metric, and the
        scalars that are `replicated`, in one transfer from the device. A metric whose count is 0 is left out."""
        scalars = {"loss": self.loss, **self.losses, **scalars}
        if self.losses:
            self._join_names(ranks)
        _require_same_names([*scalars, *self.sums], ranks)
        device = self.loss.device
        tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]
        joined, same = (
            [to_device_async(x.detach(), device).to(torch.float64).reshape(1) for x in some]
            for some in (tensors, replicated.values())
        )
        values = torch.cat([all_reduce(torch.cat(joined), ranks.dp), *same]).tolist()
        result = dict(zip([*scalars, *replicated], values[: len(scalars)] + values[len(joined) :], strict=True))
        sums = values[len(scalars) :][: len(self.sums)]
        counts = values[len(scalars) + len(self.sums) : len(joined)]
        result.update({name: s / c for name, s, c in zip(self.sums, sums, counts, strict=True) if c})
        return result

    def _join_names(self, ranks: Ranks) -> None:
        """Give every data-parallel rank the metrics of all: some may have no document of an adapter."""
        of_ranks: list[list[str]] = [[] for _ in range(ranks.dp.size)]
        if ranks.dp.size > 1:
            torch.distributed.all_gather_object(of_ranks, [*self.sums], group=ranks.dp.process_group)
        zero = torch.zeros_like(self.loss)
        joined = sorted({*self.sums}.union(*of_ranks))
        self.sums = {name: self.sums.get(name, zero) for name in joined}
        self.counts = {name: self.counts.get(name, zero) for name in joined}


def _require_same_names(names: Sequence[str], ranks: Ranks) -> None:
    """Raise RuntimeError on every rank where data-parallel ranks have metrics of different names."""
    if ranks.dp.size == 1:
        return
    digest = float(zlib.crc32(" ".join(names).encode()))
    low, high = all_reduce(torch.tensor([-digest, digest], dtype=torch.float64), ranks.dp, "max").tolist()
    if -low != high:
        raise RuntimeError(
            f"data-parallel ranks report different metrics, this one {', '.join(names)}; "
            "a loss function must give the same names for every micro-batch"
        )


def micro_batches(
    batch: Batch,
    max_tokens: int,
    vocab_size: int,
    *,
    share_prefixes: bool = False,
    every_token: bool = True,
    sort: bool = False,
    n_loras: int | None = None,
    image_format: ImageFormat | None = None,
) -> tuple[PackedBatch, list[PackedBatch]]:
    """Return the whole batch as one pack, and its micro-batches, at least one.

    `share_prefixes` searches each for common prefixes, and where it finds some the documents' last tokens, which
    predict none, are not computed either, unless `every_token` counts, as for the load of experts and a critic's
    values; `sort` has the model compute the documents of those without by length, and keeps their order in the pack.
    `n_loras` is the number of the model's adapters if it has several: documents then say which they have, and share
    prefixes only with those of the same. `image_format` is what an image is to the model; prefixes with images are
    common where the pictures are equal. Raises BatchError for a batch without a document, or with a token or label
    outside the vocabulary.
    """
    packed = batch.to(torch.device("cpu")) if isinstance(batch, PackedBatch) else pack(batch)
    if not packed.lengths:
        raise BatchError(
            "the batch has no document; give every data-parallel rank one, with a loss_mask of zeros if it is not to "
            "be trained"
        )
    for what, ids in (("token id", packed.tokens), ("label", packed.labels[packed.labels != IGNORE_INDEX])):
        low, high = ids.aminmax() if ids.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            wrong = int(low if low < 0 else high)
            raise BatchError(
                f"{what} {wrong} is outside the model's vocabulary of {vocab_size}; is it this model's tokenizer?"
            )
    if n_loras is not None:
        packed = packed.with_loras(n_loras)
    packed = packed.with_images(image_format)
    parts = split(packed, max_tokens)
    if share_prefixes:
        parts = [_with_shared_prefixes(mb, vocab_size, every_token) for mb in parts]
    if sort:
        parts = [mb.sorted_by_length() for mb in parts]
    return packed, parts if n_loras is None else [mb.with_computed_lora_ids() for mb in parts]


def _with_shared_prefixes(mb: PackedBatch, vocab_size: int, every_token: bool) -> PackedBatch:
    # A document's last token may be part of an image, or of a text whose next token the caller knows.
    every_token = every_token or mb.has_images or bool((mb.labels[mb.cu_seqlens[1:].long() - 1] != IGNORE_INDEX).any())
    return replace(mb, shared=shared_prefixes(_sharing_keys(mb, vocab_size), mb.lengths, every_token=every_token))


def _sharing_keys(mb: PackedBatch, vocab_size: int) -> Tensor:
    """Return numbers [T] that are equal for tokens that can be computed once: also of those that show the same
    picture, and of those that use given experts."""
    columns = [_token_keys(mb, vocab_size).unsqueeze(1)]
    if mb.has_images:
        columns.append(mb.image_ids().unsqueeze(1))
    if mb.routed_experts is not None:
        columns.append(mb.routed_experts.flatten(1))
    return columns[0].squeeze(1) if len(columns) == 1 else torch.cat(columns, 1).unique(dim=0, return_inverse=True)[1]


def _token_keys(mb: PackedBatch, vocab_size: int) -> Tensor:
    """Return numbers [T] that are equal for equal tokens of documents of one adapter."""
    return mb.tokens if mb.lora_ids is None else mb.tokens + vocab_size * (mb.token_lora_ids() + 1)


def lora_totals(
    parts: Sequence[PackedBatch],
    names: Sequence[str],
    loss_weight_fn: LossWeightFn,
    ranks: Ranks,
    device: torch.device,
) -> dict[int, LoRATotals]:
    """Return what each adapter has in the micro-batches of all ranks, by its index among `names`; those without a
    document are left out. Raises BatchError for an adapter whose documents have nothing to train."""
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    for mb in parts:
        for index, part in mb.by_lora():
            if index != NO_LORA:
                totals[:, index] += torch.tensor([float(loss_weight_fn(part)), part.n_tokens], dtype=torch.float64)
    if ranks.dp.size > 1:
        totals = all_reduce(totals.to(device), ranks.dp)
    shares = {
        index: LoRATotals(name, weight, tokens)
        for index, (name, weight, tokens) in enumerate(zip(names, *totals.tolist(), strict=True))
        if tokens
    }
    for lora_share in shares.values():
        if not lora_share.weight > 0:
            raise BatchError(
                f"the documents of adapter {lora_share.name!r} have nothing to train: their loss weight is "
                f"{lora_share.weight:g} (is loss_mask all zero?)"
            )
    return shares


def total_weight(
    parts: Sequence[PackedBatch], loss_weight_fn: LossWeightFn, ranks: Ranks, device: torch.device
) -> float:
    """Return the loss weight of all micro-batches of all ranks. Raises BatchError for 0."""
    total = float(sum(loss_weight_fn(mb) for mb in parts))
    if ranks.dp.size > 1:
        total = float(all_reduce(torch.tensor(total, dtype=torch.float64, device=device), ranks.dp))
    if not total > 0:
        raise BatchError(f"the batch has nothing to train: its loss weight is {total:g} (is loss_mask all zero?)")
    return total


@dataclass(frozen=True)
class ContextSharding:
    """How the tokens of a micro-batch are split over context- and tensor-parallel ranks."""

    ranks: Ranks
    kind: ContextParallelKind
    attn_type: str
    repeats_first: bool = False
    """Whether padding repeats the first token of the pack, see `archon.parallel.context`."""

    def shard(self, mb: PackedBatch, device: torch.device, min_tokens: int = 0) -> SequenceShard:
        """Return this rank's share of the tokens that are computed of a pack, with at least `min_tokens` on each
        rank."""
        return SequenceShard(self._plan(mb, min_tokens), self.ranks.cp, self.ranks.tp, device)

    def scored(self, mb: PackedBatch, shard: SequenceShard) -> TokenShard | None:
        """Return which tokens this rank scores: those that it computes, or whose common beginning it does; None for
        all."""
        if mb.shared is None:
            return shard
        if self.ranks.cp.size == 1:
            return None
        return TokenShard.by_owner(mb.shared.gather_index.cpu() // len(shard.index), self.ranks.cp, shard.index.device)

    def rows(self, mb: PackedBatch) -> int:
        """Return the number of tokens on each context-parallel rank, padding included."""
        return sum(stop - start for _, start, stop in self._plan(mb, 0).chunks[0])

    def _plan(self, mb: PackedBatch, min_tokens: int) -> ContextPlan:
        lengths = (mb.order or mb).lengths if mb.shared is None else (mb.n_computed_tokens,)
        plan = zigzag_plan if self.ranks.cp.size > 1 and self.kind == "allgather" else contiguous_plan
        padded = plan(lengths, self.ranks.cp.size, self.ranks.tp.size, min_tokens)
        return padded.repeating_first() if self.repeats_first else padded

    def attention(self, shard: SequenceShard) -> ContextParallelAttention | PackedAttention:
        """Return the attention metadata of this rank's share of documents that share nothing."""
        if self.ranks.cp.size > 1:
            attention = GatheredAttention if self.kind == "allgather" else UlyssesAttention
            return attention(shard, self.attn_type)
        packed = PackedAttention.from_lengths(shard.plan.lengths, shard.index.device, self.attn_type)
        packed.valid_mask = shard.valid_mask
        return packed

    def prefix_attention(
        self, shared: SharedPrefixes, shard: SequenceShard, scored: TokenShard | None
    ) -> UlyssesAttention | PrefixAttention:
        """Return the same of documents with shared prefixes, of which this rank scores `scored`."""
        prefixes = PrefixAttention(shared.padded(shard.padding), self.attn_type)
        attention = prefixes if scored is None else UlyssesAttention(shard, self.attn_type, prefixes)
        attention.valid_mask = shard.take(shared.counts()).chunk(self.ranks.tp.size)[self.ranks.tp.rank]
        attention.token_rows = shared.gather_index
        if scored is not None:
            attention.token_rows = scored.take(shared.gather_index - self.ranks.cp.rank * len(shard.index))
        return attention


@dataclass(frozen=True)
class MicroBatchRunner:
    """Run micro-batches through a model, forward and backward, on this rank's share of their tokens.

    A pipeline stage is given the previous stage's hidden states as `input`, and micro-batches are padded to
    `min_tokens` tokens a context-parallel rank.
    """

    model: BaseArchonModel
    device: torch.device
    tokens: ContextSharding
    is_critic: bool
    load: RouterLoad
    router_aux_loss_coef: float = 0.0
    input: Tensor | None = None
    min_tokens: int = 0
    lora_names: tuple[str, ...] = ()
    """The names of a model's several adapters, in the order of their indices."""

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
        """Run the model's forward on a micro-batch that is on the device. Returns the outputs of all its tokens, in
        pack order, on every rank. `rows`, on the CPU, are the labeled ones, in the model's order."""
        labels, loss_weights = (None if x is None else mb.in_model_order(x) for x in (labels, loss_weights))
        of_tokens = mb.temperature(temperature)
        if isinstance(of_tokens, Tensor):
            of_tokens = mb.in_model_order(of_tokens)
        out, shard = self._run(mb, labels, loss_weights, rows, temperature=of_tokens, entropy=entropy)

        def gather(x: Tensor) -> Tensor:
            return mb.in_pack_order(x if shard is None else shard.gather(x))

        if isinstance(out, WeightedLoss):
            loss = out.loss if shard is None else all_reduce_replicated(out.loss, self.ranks.cp)
            return WeightedLoss(loss, gather(out.logprobs))
        if isinstance(out, TokenScores):
            return TokenScores(gather(out.logprobs), None if out.entropy is None else gather(out.entropy))
        return gather(out)

    def hidden(self, mb: PackedBatch) -> Tensor:
        """Return the output of a stage without a head: [T / cp / tp, dim] of the padded micro-batch."""
        return _tensor(self._run(mb, None, None, None)[0])

    def _run(
        self,
        mb: PackedBatch,
        labels: Tensor | None,
        loss_weights: Tensor | None,
        rows: Tensor | None,
        **head: Any,
    ) -> tuple[Tensor | TokenScores | WeightedLoss, TokenShard | None]:
        """Run the model on this rank's share of the tokens. Returns its output, and which tokens it is of, None for
        all."""
        documents = mb.order or mb
        tokens, positions = mb.in_model_order(mb.tokens), mb.model_positions()
        experts = None if mb.routed_experts is None else mb.in_model_order(mb.routed_experts)
        if mb.shared is not None:
            tokens, positions = tokens[mb.shared.rows], positions[..., mb.shared.rows]
            experts = None if experts is None else experts.index_select(0, mb.shared.rows)
        attention: AttentionMeta
        shard = scored = None
        if self.ranks.cp.size * self.ranks.tp.size > 1 or self.min_tokens:
            shard = self.tokens.shard(mb, self.device, self.min_tokens)
            scored = self.tokens.scored(mb, shard)
            shared = mb.shared
            attention = (
                self.tokens.attention(shard) if shared is None else self.tokens.prefix_attention(shared, shard, scored)
            )
            tokens = shard.take_inputs(tokens) if self.input is None else self.input
            positions = shard.positions(positions)
            experts = None if experts is None else shard.take_layer_inputs(experts, UNKNOWN_EXPERT)
        elif mb.shared is not None:
            attention = PrefixAttention(mb.shared, self.tokens.attn_type)
        else:
            attention = PackedAttention(documents.cu_seqlens, mb.max_seqlen, self.tokens.attn_type, documents.lengths)
        if mb.computed_lora_ids is not None:
            # All names, since all ranks must have gradients of the same parameters.
            ids = mb.computed_lora_ids if shard is None else shard.take_cpu(mb.computed_lora_ids, NO_LORA)
            attention.lora_mapping = LoRAMapping.of(self.lora_names, ids, self.device, tp=self.ranks.tp)
        if scored is not None:
            labels = None if labels is None else scored.take(labels, IGNORE_INDEX)
            loss_weights = None if loss_weights is None else scored.take(loss_weights)
            rows = None if rows is None else scored.rows(rows)
            if isinstance(head.get("temperature"), Tensor):
                head["temperature"] = scored.take(head["temperature"], 1.0)
        head["label_rows"] = None if rows is None else to_device_async(rows, self.device)
        head |= {"labels": labels, "loss_weights": loss_weights, "images": self._images(mb, shard)}
        if experts is not None:
            head["routed_experts"] = experts
        return self.model(tokens, positions, documents.cu_seqlens, mb.max_seqlen, attention, **head), scored

    def _images(self, mb: PackedBatch, shard: SequenceShard | None) -> PackedImages | None:
        """Return the images of this rank's tokens on the device; None on a stage without embeddings, and where no rank
        has an image. Where only others have, the tower runs on nothing."""
        if self.input is not None:
            return None
        images = mb.model_images()
        if images is None:
            if not mb.runs_vision_encoder:
                return None
            assert mb.image_format is not None
            return PackedImages.empty(mb.image_format, self.device)
        if shard is not None:
            images = images.for_shard(*shard.local_rows(images.rows))
        return images.to(self.device)

    def with_vision_flags(self, parts: Sequence[PackedBatch], rounds: int) -> list[PackedBatch]:
        """Return `rounds` micro-batches: this rank's, and then idle ones without images. Each knows whether a rank has
        an image in its round, on which the data-parallel ranks agree here, once for a batch."""
        idle = [parts[0].without_images()] * (rounds - len(parts))
        batches = [*parts, *idle]
        if parts[0].image_format is None:
            return batches
        found = self.ranks.all_reduce_any([mb.has_images for mb in batches], self.device)
        return [replace(mb, runs_vision_encoder=runs) for mb, runs in zip(batches, found, strict=True)]

    def loss(self, mb: PackedBatch, loss: BatchLoss, sums: MetricSums, *, fuse: bool = True) -> Tensor:
        """Return the term of a micro-batch on the device in the batch's loss, with gradient; adds it and the metrics
        to `sums`.

        Tokens whose `loss_mask` is 0 are not scored: their logprob and entropy are 0. `fuse` allows a fused loss, which
        cannot be differentiated in parts.
        """
        if loss.per_lora is not None:
            return self._multi_lora_loss(mb, loss, loss.per_lora, sums, fuse)
        result = self._summed_loss(mb, loss.fn, loss.temperature, fuse)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        value = value / loss.denominator
        sums.loss += value.detach()
        sums.add(metrics)
        return value

    def _multi_lora_loss(
        self, mb: PackedBatch, loss: BatchLoss, shares: Mapping[int, LoRATotals], sums: MetricSums, fuse: bool
    ) -> Tensor:
        """Same as `loss`, of a model with several adapters: the loss function is called with the documents of each."""
        labels, rows, fn = mb.loss_labels(), mb.labeled_rows(only_trained=True), loss.fn
        parts = [(shares[index], part) for index, part in mb.by_lora() if index != NO_LORA]
        if fuse and isinstance(fn, WeightedTokenLoss):
            weights = torch.zeros(mb.n_tokens, dtype=torch.float64, device=self.device)
            for lora_share, part in parts:
                weights[_source(part, self.device)] = fn.token_weights(part).double() / lora_share.weight
            fused = self.call(mb, labels, loss.temperature, entropy=False, loss_weights=weights, rows=rows)
            assert isinstance(fused, WeightedLoss)
            for lora_share, part in parts:
                source = _source(part, self.device)
                logprobs = fused.logprobs[source].detach()
                sums.losses[f"{lora_share.name}/loss"] -= (weights[source] * logprobs.double()).sum()
                sums.add({f"{lora_share.name}/{name}": pair for name, pair in fn.metrics(logprobs, part).items()})
            sums.loss += fused.loss.detach()
            return fused.loss
        scores = self.call(mb, labels, loss.temperature, getattr(fn, "needs_entropy", True), rows=rows)
        assert isinstance(scores, TokenScores)
        total = scores.logprobs.new_zeros(()) if parts else scores.logprobs.sum() * 0.0
        for lora_share, part in parts:
            source = _source(part, self.device)
            entropy = None if scores.entropy is None else scores.entropy[source]
            result = fn(scores.logprobs[source], entropy, part)
            value, metrics = result if isinstance(result, tuple) else (result, {})
            value = value / lora_share.weight
            sums.losses[f"{lora_share.name}/loss"] += value.detach()
            sums.add({f"{lora_share.name}/{name}": pair for name, pair in metrics.items()})
            total = total + value
        sums.loss += total.detach()
        return total

    def _summed_loss(
        self, mb: PackedBatch, loss_fn: LossFn, temperature: float, fuse: bool
    ) -> Tensor | tuple[Tensor, Metrics]:
        if self.is_critic:
            if isinstance(loss_fn, WeightedTokenLoss):
                raise ConfigError(
                    f"{_name(loss_fn)} weighs token log-probabilities, and a critic gives values; use a loss of values"
                )
            return loss_fn(_tensor(self.call(mb)), None, mb)
        labels, rows = mb.loss_labels(), mb.labeled_rows(only_trained=True)
        if fuse and isinstance(loss_fn, WeightedTokenLoss):
            weights = loss_fn.token_weights(mb)
            fused = self.call(mb, labels, temperature, entropy=False, loss_weights=weights, rows=rows)
            assert isinstance(fused, WeightedLoss)
            return fused.loss, loss_fn.metrics(fused.logprobs, mb)
        scores = self.call(mb, labels, temperature, getattr(loss_fn, "needs_entropy", True), rows=rows)
        assert isinstance(scores, TokenScores)
        return loss_fn(scores.logprobs, scores.entropy, mb)

    def accumulate(self, parts: Sequence[PackedBatch], loss: BatchLoss, reduce_every: bool) -> MetricSums:
        """Add the gradient of the batch's loss to the parameters. Returns the sums of this rank's micro-batches.

        The auxiliary loss of a mixture of experts is that of each micro-batch, weighted by its share of the
        denominator.
        """
        sums = MetricSums.empty(loss, self.device)
        rounds = self.ranks.all_reduce_max(len(parts), self.device)
        batches = self.with_vision_flags(parts, rounds)
        for index, mb in enumerate(batches):
            set_gradient_reduction(self.model, reduce_every or index == rounds - 1)
            if index < len(parts):
                with phase("forward"):
                    value = self.loss(mb.to(self.device), loss, sums)
                if not value.requires_grad:
                    raise ConfigError(f"{_name(loss.fn)} returned a loss without gradient; was it detached?")
                self.load.add()
                if self.router_aux_loss_coef and self.model.router_stats:
                    aux = load_balancing_loss(self.model.router_stats, (self.ranks.cp, self.ranks.tp))
                    fraction = float(loss.weight_fn(parts[index])) / loss.denominator
                    sums.add({"router_aux_loss": (aux.detach() * fraction, aux.new_full((), fraction))})
                    value = value + self.router_aux_loss_coef * fraction * aux
            else:  # another rank has more micro-batches, and its collectives need this one
                with phase("forward"):
                    value = self.run_idle(mb.to(self.device))
            with phase("backward"):
                value.backward()
            self.model.router_stats = []  # it would keep the graph until the next forward
        return sums

    def run_idle(self, mb: PackedBatch) -> Tensor:
        """Run a forward that scores nothing. Returns a loss with zero gradients, for the collectives of a real one."""
        if self.is_critic:
            out = _tensor(self.call(mb))
        else:
            nothing = torch.zeros(0, dtype=torch.int64)
            scores = self.call(mb, torch.full_like(mb.labels, IGNORE_INDEX), entropy=False, rows=nothing)
            assert isinstance(scores, TokenScores)
            out = scores.logprobs
        return (out * 0.0).sum()

    @torch.no_grad()
    def evaluate(self, parts: Sequence[PackedBatch], loss: BatchLoss) -> MetricSums:
        """Return the sums of this rank's micro-batches, without gradient."""
        sums = MetricSums.empty(loss, self.device)
        with self._forward_only(parts) as own:
            for mb in own:
                self.loss(mb.to(self.device), loss, sums)
        return sums

    @torch.no_grad()
    def scores(
        self, parts: Sequence[PackedBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """Return logprobs [T] and, with `entropy`, entropies [T] of each micro-batch's tokens, or of those that
        `loss_mask` marks; of a critic, values."""
        with self._forward_only(parts) as own:
            return [self.score(mb.to(self.device), temperature, entropy, only_trained) for mb in own]

    def score(self, mb: PackedBatch, temperature: float, entropy: bool, only_trained: bool) -> list[Tensor]:
        """Same as `scores`, for one micro-batch that is on the device."""
        if self.is_critic:
            return [_tensor(self.call(mb))]
        labels = mb.loss_labels() if only_trained else mb.labels
        scores = self.call(mb, labels, temperature, entropy, rows=mb.labeled_rows(only_trained))
        assert isinstance(scores, TokenScores)
        return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]

    @contextmanager
    def _forward_only(self, parts: Sequence[PackedBatch]) -> Iterator[Sequence[PackedBatch]]:
        """Yield `parts` for forwards without backward; then runs idle ones until every rank has run as many, and frees
        the gathered weights.

        The ranks exchange their numbers before the first forward: later, some would still be gathering weights.
        """
        batches = self.with_vision_flags(parts, self.ranks.all_reduce_max(len(parts), self.device))
        try:
            yield batches[: len(parts)]
            for mb in batches[len(parts) :]:
                self.run_idle(mb.to(self.device))
        finally:
            reshard(self.model)

    @property
    def loads(self) -> list[RouterLoad]:
        """The loads of all routers, one object for each part of the model."""
        return [self.load]

    def read(self, sums: MetricSums, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """See `MetricSums.read`."""
        return sums.read(self.ranks, replicated, **scalars)


def _tensor(output: Tensor | TokenScores | WeightedLoss) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def _source(part: PackedBatch, device: torch.device) -> Tensor:
    """Return the positions of a part's tokens in the micro-batch that it is of, on the device."""
    assert part.source is not None
    return to_device_async(part.source, device)


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
