"""Plan of a forward: micro-batches, the compute order of their tokens, and each rank's shard.

A token of a micro-batch has an index in the *pack*, in the *compute order* (documents by length, or shared prefixes
once) and in this rank's *shard* of the compute order. `ForwardPlan` maps between the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch, pack, split
from archon.models.args.base import ImageFormat
from archon.models.attention.context_parallel import GatheredAttention, UlyssesAttention
from archon.models.attention.meta import AttentionMeta, PackedAttention, PrefixAttention
from archon.models.attention.prefix.plan import SharedPrefixes, shared_prefixes
from archon.models.base import ModelInputs
from archon.models.layers.head import IGNORE_INDEX
from archon.models.layers.routed_experts import UNKNOWN_EXPERT
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.vision.images import PackedImages
from archon.parallel.context import ContextPlan, SequenceShard, TokenShard, contiguous_plan, zigzag_plan
from archon.parallel.ranks import Ranks
from archon.parallel.transfer import to_device_async
from archon.schema.config import ContextParallelKind
from archon.schema.errors import BatchError

Batch = Mapping[str, Any] | PackedBatch

ScoredTokens = Literal["labeled", "trained", "none"]
"""Tokens that the head scores: every token with a label, the tokens of `loss_mask`, or none (an idle micro-batch)."""


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Order in which the model computes the T tokens of a micro-batch.

    Attributes:
        documents: document indices in compute order.
        lengths: document lengths in compute order.
        cu_seqlens: int32 [B + 1], document boundaries in compute order.
        rows: int64 [U], the pack index of each computed token; None for pack order.
        inverse: int64 [T], the inverse of a permutation `rows`. Scores are then in compute order, else in pack order.
        prefixes: the shared prefixes, computed once; None without them.
    """

    documents: Sequence[int]
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    rows: Tensor | None = None
    inverse: Tensor | None = None
    prefixes: SharedPrefixes | None = None

    @classmethod
    def of_pack(cls, documents: PackedBatch, prefixes: SharedPrefixes | None = None) -> TokenOrder:
        """Return pack order, with only the rows that `prefixes` computes."""
        rows = None if prefixes is None else prefixes.rows
        return cls(range(documents.n_documents), documents.lengths, documents.cu_seqlens, rows, None, prefixes)

    @classmethod
    def by_length(cls, documents: PackedBatch) -> TokenOrder:
        """Return documents by ascending length, so that attention batches documents of equal length.

        For the many short documents of RL this takes a handful of attention calls instead of hundreds. Multi-LoRA
        documents are sorted by LoRA first, so that layers need not sort their tokens. Documents that are almost sorted
        stay in pack order.
        """
        lengths, lora_ids = documents.lengths, documents.lora_ids
        keys = lengths if lora_ids is None else list(zip(lora_ids, lengths, strict=True))
        is_grouped = lora_ids is None or list(lora_ids) == sorted(lora_ids)
        if is_grouped and sum(1 for _ in groupby(keys)) <= 2 * len({*keys}):
            return cls.of_pack(documents)
        pack_lengths = torch.tensor(lengths)
        order = torch.tensor(sorted(range(len(lengths)), key=lambda document: keys[document]))
        sorted_lengths = pack_lengths[order]
        bounds = torch.nn.functional.pad(sorted_lengths.cumsum(0), (1, 0))
        shift = (pack_lengths.cumsum(0) - pack_lengths)[order] - bounds[:-1]
        rows = torch.arange(int(bounds[-1])) + torch.repeat_interleave(shift, sorted_lengths)
        return cls(order.tolist(), tuple(sorted_lengths.tolist()), bounds.int(), rows, torch.argsort(rows))

    def computed(self, x: Tensor, dim: int = 0) -> Tensor:
        """Reorder per-token inputs from the pack to compute order."""
        return x if self.rows is None else x.index_select(dim, self.rows)

    def scored(self, x: Tensor) -> Tensor:
        """Reorder per-token inputs of the head, such as labels, from the pack to the order of its scores."""
        return x if self.inverse is None else self.computed(x)

    def in_pack_order(self, x: Tensor) -> Tensor:
        """Reorder scores to the pack, with gradient."""
        return x if self.inverse is None else x.index_select(0, self.inverse)

    def to(self, device: torch.device) -> TokenOrder:
        """Return the order with its tensors on `device`."""
        tensors = (self.cu_seqlens, self.rows, self.inverse)
        cu_seqlens, rows, inverse = (None if x is None else to_device_async(x, device) for x in tensors)
        assert cu_seqlens is not None
        prefixes = None if self.prefixes is None else self.prefixes.to(device)
        return TokenOrder(self.documents, self.lengths, cu_seqlens, rows, inverse, prefixes)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents of one forward and the order of their tokens, on the CPU."""

    documents: PackedBatch
    order: TokenOrder

    @property
    def n_computed_tokens(self) -> int:
        """The number of tokens that the model computes; shared prefixes count once."""
        return self.documents.n_tokens if self.order.rows is None else self.order.rows.numel()


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
) -> tuple[PackedBatch, list[MicroBatch]]:
    """Pack a batch and split it into micro-batches, at least one.

    Args:
        batch: a padded batch (see `pack`) or a packed one.
        max_tokens: the most tokens of a micro-batch.
        vocab_size: the size of the model's vocabulary.
        share_prefixes: compute the shared prefixes of documents once.
        every_token: with shared prefixes, also compute the last token of every document. It predicts nothing, but
            expert counts and a critic's values include it.
        sort: compute documents by length in micro-batches without shared prefixes.
        n_loras: the number of LoRAs of a multi-LoRA model. Only documents of one LoRA share prefixes.
        image_format: the image format of a vision-language model. Prefixes with equal images are shared.

    Returns:
        The whole batch as one pack, and its micro-batches.

    Raises:
        BatchError: the batch has no document, or a token or label outside the vocabulary.
    """
    # 1. Check the documents.
    packed = batch.to(torch.device("cpu")) if isinstance(batch, PackedBatch) else pack(batch)
    if not packed.lengths:
        raise BatchError(
            "the batch has no document; give every data-parallel rank one, with a loss_mask of zeros if it has "
            "nothing to train"
        )
    for kind, ids in (("token id", packed.tokens), ("label", packed.labels[packed.labels != IGNORE_INDEX])):
        low, high = ids.aminmax() if ids.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            wrong = int(low if low < 0 else high)
            raise BatchError(
                f"{kind} {wrong} is outside the model's vocabulary of {vocab_size}; is it this model's tokenizer?"
            )
    if n_loras is not None:
        packed = packed.with_loras(n_loras)
    packed = packed.with_images(image_format)
    # 2. Split them, and choose the order of the tokens in each micro-batch.
    parts = []
    for documents in split(packed, max_tokens):
        prefixes = _prefixes(documents, vocab_size, every_token, image_format) if share_prefixes else None
        by_length = sort and prefixes is None
        order = TokenOrder.by_length(documents) if by_length else TokenOrder.of_pack(documents, prefixes)
        parts.append(MicroBatch(documents, order))
    return packed, parts


def _prefixes(
    documents: PackedBatch, vocab_size: int, every_token: bool, image_format: ImageFormat | None
) -> SharedPrefixes | None:
    """Return the shared prefixes of documents: equal tokens, LoRAs, images and replayed experts."""
    last_labels = documents.labels[documents.cu_seqlens[1:].long() - 1]
    # The last token of a document may belong to an image, or to a part of a text with a known next token.
    every_token = every_token or documents.has_images or bool((last_labels != IGNORE_INDEX).any())
    keys = documents.tokens
    if documents.lora_ids is not None:
        keys = keys + vocab_size * (documents.token_lora_ids() + 1)
    columns = [keys.unsqueeze(1)]
    if documents.has_images:
        assert image_format is not None
        images = [image.digest for row in documents.images or () for image in row]
        numbers = {digest: number for number, digest in enumerate(dict.fromkeys(images))}
        image_ids = torch.tensor([*(numbers[digest] for digest in images), -1])
        columns.append(image_ids[_token_images(documents, image_format)].unsqueeze(1))
    if documents.routed_experts is not None:
        columns.append(documents.routed_experts.flatten(1))
    if len(columns) > 1:
        keys = torch.cat(columns, 1).unique(dim=0, return_inverse=True)[1]
    return shared_prefixes(keys, documents.lengths, every_token=every_token)


def _token_images(documents: PackedBatch, image_format: ImageFormat) -> Tensor:
    """Return the index among all images for each token, int64 [T]; -1 for text."""
    areas = [height * width for row in documents.images or () for height, width in (image.size for image in row)]
    merged = torch.tensor(areas) // image_format.merge_size**2
    numbers = torch.full_like(documents.tokens, -1)
    numbers[documents.tokens == image_format.token] = torch.arange(len(areas)).repeat_interleave(merged)
    return numbers


def _packed_images(mb: MicroBatch, image_format: ImageFormat) -> PackedImages:
    """Return the images of a micro-batch in compute order, on the CPU."""
    documents, order = mb.documents, mb.order
    assert documents.images is not None
    images = [image for document in order.documents for image in documents.images[document]]
    tokens = order.computed(documents.tokens)
    if order.prefixes is not None:
        numbers = _token_images(documents, image_format)[order.prefixes.rows]
        images = [images[number] for number in numbers[numbers >= 0].unique_consecutive().tolist()]
    return PackedImages.from_images(tokens, images, image_format)


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One micro-batch on the device: its documents and this rank's inputs of the model and of the head.

    Attributes:
        documents: all documents of the micro-batch.
        order: compute order of the documents' tokens.
        shard: this rank's tokens between layers under context, tensor or pipeline parallelism; None for all.
        score_shard: the tokens that this rank scores; None for all.
        ranks: the ranks of the layout.
        labels: int64, the labels of the tokens that this rank scores; None for a critic.
        label_rows: int64, the indices of labels other than -100; None for a critic.
        images: the images of this rank's tokens; None if no rank has one.
        routed_experts: the experts to replay for this rank's tokens; None without them.
        lora_mapping: the LoRA of each token on this rank; None without multi-LoRA.
        attn_type: the attention backend.
        gathers_keys: whether context parallelism gathers keys, else it exchanges heads.
    """

    documents: PackedBatch
    order: TokenOrder
    shard: SequenceShard | None
    score_shard: TokenShard | None
    ranks: Ranks
    labels: Tensor | None
    label_rows: Tensor | None
    images: PackedImages | None
    routed_experts: Tensor | None
    lora_mapping: LoRAMapping | None
    attn_type: str
    gathers_keys: bool

    def model_inputs(self, hidden: Tensor | None = None) -> ModelInputs:
        """Return this rank's inputs; `hidden` replaces the tokens on a pipeline stage without embeddings."""
        tokens = self.order.computed(self.documents.tokens)
        positions = self.order.computed(self.documents.positions, dim=-1)
        if self.shard is not None:
            tokens, positions = self.shard.take_inputs(tokens), self.shard.positions(positions)
        attention = self._attention()
        if self.lora_mapping is not None:
            attention.lora_mapping = self.lora_mapping
        if hidden is not None:
            return ModelInputs(hidden, positions, attention, None, self.routed_experts)
        return ModelInputs(tokens, positions, attention, self.images, self.routed_experts)

    def _attention(self) -> AttentionMeta:
        """Return how this rank's tokens attend, with the rows of padding and of shared prefixes."""
        shard, prefixes, cp, tp = self.shard, self.order.prefixes, self.ranks.cp, self.ranks.tp
        if shard is None:
            if prefixes is not None:
                return PrefixAttention(prefixes, self.attn_type)
            bounds, lengths = self.order.cu_seqlens, self.order.lengths
            return PackedAttention(bounds, self.documents.max_seqlen, self.attn_type, lengths)
        if prefixes is None and cp.size > 1:
            return (GatheredAttention if self.gathers_keys else UlyssesAttention)(shard, self.attn_type)
        if prefixes is None:
            packed = PackedAttention.from_lengths(shard.plan.lengths, shard.index.device, self.attn_type)
            packed.valid_mask = shard.valid_mask
            return packed
        padded = PrefixAttention(prefixes.padded(shard.padding), self.attn_type)
        scored = self.score_shard
        attention = padded if scored is None else UlyssesAttention(shard, self.attn_type, padded)
        attention.valid_mask = shard.take(prefixes.counts()).chunk(tp.size)[tp.rank]
        attention.token_rows = prefixes.gather_index
        if scored is not None:
            attention.token_rows = scored.take(prefixes.gather_index - cp.rank * len(shard.index))
        return attention

    def head_input(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return per-token values of the pack, such as loss weights, for the tokens that this rank scores."""
        x = self.order.scored(x)
        return x if self.score_shard is None else self.score_shard.take(x, fill)

    def in_pack_order(self, scores: Tensor) -> Tensor:
        """Gather this rank's scores from all ranks and return them in pack order, with gradient."""
        return self.order.in_pack_order(scores if self.score_shard is None else self.score_shard.gather(scores))


@dataclass(frozen=True)
class ForwardPlanner:
    """Plans the forwards of an engine.

    Attributes:
        ranks: the ranks of the layout.
        device: the device of the plans.
        kind: the kind of context parallelism.
        attn_type: the attention backend.
        is_critic: whether the model has a value head.
        repeats_first: padding repeats the first token of the pack, see `archon.parallel.context`.
        lora_names: the LoRAs of a multi-LoRA model, in the order of their indices.
        image_format: the image format of a vision-language model.
    """

    ranks: Ranks
    device: torch.device
    kind: ContextParallelKind
    attn_type: str
    is_critic: bool = False
    repeats_first: bool = False
    lora_names: tuple[str, ...] = ()
    image_format: ImageFormat | None = None

    def plan(
        self, mb: MicroBatch, scored: ScoredTokens, runs_vision_encoder: bool = False, *, min_tokens: int = 0
    ) -> ForwardPlan:
        """Plan the forward of a micro-batch and copy its inputs to the device without a host sync.

        Args:
            mb: the micro-batch, on the CPU.
            scored: the tokens that a language-model head scores; a critic predicts the values of all tokens.
            runs_vision_encoder: whether some rank has an image in this round, so that all run the vision encoder.
            min_tokens: the least tokens of a context-parallel rank, for the fixed shapes of a pipeline.
        """
        documents, order, cp, tp, device = mb.documents, mb.order, self.ranks.cp, self.ranks.tp, self.device
        # 1. Shard the computed tokens. With shared prefixes a rank scores the tokens with hidden states on this rank.
        shard: SequenceShard | None = None
        score_shard: TokenShard | None = None
        if cp.size * tp.size > 1 or min_tokens:
            shard = score_shard = SequenceShard(self._context_plan(mb, min_tokens), cp, tp, device)
            if order.prefixes is not None:
                owner = order.prefixes.gather_index // len(shard.index)
                score_shard = None if cp.size == 1 else TokenShard.by_owner(owner, cp, device)
        # 2. Find the labeled rows on the CPU, since a mask on a GPU waits for its size.
        labels = label_rows = None
        if not self.is_critic:
            labels = documents.labels
            if scored == "none":
                labels = torch.full_like(labels, IGNORE_INDEX)
            elif scored == "trained":
                labels = documents.loss_labels()
            labels = order.scored(labels)
            label_rows = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            label_rows = label_rows if score_shard is None else score_shard.rows(label_rows)
            labels, label_rows = to_device_async(labels, device), to_device_async(label_rows, device)
            labels = labels if score_shard is None else score_shard.take(labels, IGNORE_INDEX)
        # 3. Find the images and LoRAs of this rank's tokens. An idle micro-batch runs as text.
        images = lora_mapping = None
        if documents.has_images and scored != "none":
            assert self.image_format is not None
            images = _packed_images(mb, self.image_format)
            images = images if shard is None else images.for_shard(*shard.local_rows(images.rows))
            images = images.to(device)
        elif runs_vision_encoder and self.image_format is not None:
            images = PackedImages.empty(self.image_format, device)
        if documents.lora_ids is not None:
            # All names, since every rank must have gradients of the same parameters.
            ids = order.computed(documents.token_lora_ids())
            ids = ids if shard is None else shard.take_cpu(ids, NO_LORA)
            lora_mapping = LoRAMapping.of(self.lora_names, ids, device, tp=tp)
        # 4. Copy the documents to the device.
        documents, order = documents.to(device), order.to(device)
        experts = None if documents.routed_experts is None else order.computed(documents.routed_experts)
        if experts is not None and shard is not None:
            experts = shard.take_layer_inputs(experts, UNKNOWN_EXPERT)
        return ForwardPlan(
            documents,
            order,
            shard,
            score_shard,
            self.ranks,
            labels,
            label_rows,
            images,
            experts,
            lora_mapping,
            self.attn_type,
            self.kind == "allgather",
        )

    def vision_flags(self, parts: Sequence[MicroBatch], rounds: int) -> list[bool]:
        """Return for each round whether a micro-batch of any data-parallel rank has an image."""
        if self.image_format is None:
            return [False] * rounds
        has_images = [mb.documents.has_images for mb in parts] + [False] * (rounds - len(parts))
        return self.ranks.all_reduce_any(has_images, self.device)

    def rows(self, mb: MicroBatch) -> int:
        """Return the number of tokens on each context-parallel rank, with padding."""
        return sum(stop - start for _, start, stop in self._context_plan(mb, 0).chunks[0])

    def _context_plan(self, mb: MicroBatch, min_tokens: int) -> ContextPlan:
        lengths = mb.order.lengths if mb.order.prefixes is None else (mb.n_computed_tokens,)
        plan = zigzag_plan if self.ranks.cp.size > 1 and self.kind == "allgather" else contiguous_plan
        padded = plan(lengths, self.ranks.cp.size, self.ranks.tp.size, min_tokens)
        return padded.repeating_first() if self.repeats_first else padded
