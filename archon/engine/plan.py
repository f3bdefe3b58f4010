"""Plan of the forward of a micro-batch on one rank: the inputs of the model and of the head.

A token of a micro-batch has an index in the *pack*, in the *compute order* (documents by length, or shared prefixes
once) and in this rank's *shard* of the compute order. `ForwardPlan` maps between the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.micro_batch import MicroBatch, TokenOrder, packed_images
from archon.models.args.base import ImageFormat
from archon.models.attention.context_parallel import GatheredAttention, UlyssesAttention
from archon.models.attention.meta import AttentionMeta, PackedAttention, PrefixAttention
from archon.models.base import ModelInputs
from archon.models.layers.head import IGNORE_INDEX
from archon.models.layers.routed_experts import UNKNOWN_EXPERT
from archon.models.lora.dropout import token_keys
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.mtp import MTPInputs
from archon.models.vision.images import PackedImages
from archon.parallel.context import ContextPlan, SequenceShard, TokenShard, contiguous_plan, zigzag_plan
from archon.parallel.ranks import Ranks
from archon.parallel.transfer import to_device_async
from archon.schema.config import ContextParallelKind

ScoredTokens = Literal["labeled", "trained", "none"]
"""Tokens that the head scores: every token with a label, the tokens of `loss_mask`, or none (an idle micro-batch)."""


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One micro-batch on the device: its documents and this rank's inputs of the model and of the head.

    Attributes:
        documents: all documents of the micro-batch.
        order: compute order of the documents' tokens.
        shard: this rank's tokens between layers under context, tensor or pipeline parallelism; None for all.
        score_shard: the tokens that this rank scores; None for all.
        labels: int64, the labels of the tokens that this rank scores; None for a critic.
        label_rows: int64, the indices of labels other than -100; None for a critic.
        images: the images of this rank's tokens; None if no rank has one.
        routed_experts: the experts to replay for this rank's tokens; None without them.
        lora_mapping: the LoRA of each token on this rank; None without multi-LoRA and LoRA dropout.
        mtp: the inputs of the MTP layers for this rank's tokens; None to leave them out.
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
    mtp: MTPInputs | None
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
        return ModelInputs(tokens, positions, attention, self.images, self.routed_experts, self.mtp)

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
        kind: the kind of context parallelism.
        attn_type: the attention backend.
        repeats_first: padding repeats the first token of the pack, see `archon.parallel.context`.
        lora_names: the LoRAs of a multi-LoRA model, in the order of their indices.
        image_format: the image format of a vision-language model.
        n_mtp_layers: the number of trained MTP layers.
    """

    ranks: Ranks
    device: torch.device
    kind: ContextParallelKind
    attn_type: str
    is_critic: bool = False
    repeats_first: bool = False
    lora_names: tuple[str, ...] = ()
    image_format: ImageFormat | None = None
    n_mtp_layers: int = 0

    def plan(
        self,
        mb: MicroBatch,
        scored: ScoredTokens,
        runs_vision_encoder: bool = False,
        *,
        min_tokens: int = 0,
        trains: bool = False,
    ) -> ForwardPlan:
        """Plan the forward of a micro-batch and copy its inputs to the device without a host sync.

        Args:
            mb: the micro-batch, on the CPU.
            scored: the tokens that a language-model head scores; a critic predicts the values of all tokens.
            runs_vision_encoder: whether some rank has an image in this round, so that all run the vision encoder.
            min_tokens: the least tokens of a context-parallel rank, for the fixed shapes of a pipeline.
            trains: whether a backward follows, so that the MTP layers run.
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
            images = packed_images(mb, self.image_format)
            images = images if shard is None else images.for_shard(*shard.local_rows(images.rows))
            images = images.to(device)
        elif runs_vision_encoder and self.image_format is not None:
            images = PackedImages.empty(self.image_format, device)
        if documents.lora_ids is not None:
            # All names, since every rank must have gradients of the same parameters.
            ids = order.computed(documents.token_lora_ids())
            ids = ids if shard is None else shard.take_cpu(ids, NO_LORA)
            lora_mapping = LoRAMapping.of(self.lora_names, ids, device, tp=tp)
        elif mb.dropout_seed is not None:
            keys = order.computed(token_keys(documents.tokens, documents.lengths, mb.dropout_seed))
            keys = keys if shard is None else shard.take_cpu(keys, 0)
            lora_mapping = LoRAMapping.for_dropout(keys, device, tp=tp)
        # 4. Shift the tokens and labels of the MTP layers in whole documents, before they are sharded.
        mtp = self._mtp_inputs(mb, scored, shard, score_shard) if trains and self.n_mtp_layers else None
        # 5. Copy the documents to the device.
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
            mtp,
            self.attn_type,
            self.kind == "allgather",
        )

    def _mtp_inputs(
        self, mb: MicroBatch, scored: ScoredTokens, shard: SequenceShard | None, score_shard: TokenShard | None
    ) -> MTPInputs:
        """Return this rank's inputs of the MTP layers; an idle micro-batch has no labels."""
        inputs: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for layer in range(1, self.n_mtp_layers + 1):
            tokens, labels = mb.documents.mtp_targets(layer)
            labels = mb.order.scored(torch.full_like(labels, IGNORE_INDEX) if scored == "none" else labels)
            rows = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            rows = rows if score_shard is None else score_shard.rows(rows)
            tokens, labels, rows = (to_device_async(x, self.device) for x in (mb.order.computed(tokens), labels, rows))
            if shard is not None and score_shard is not None:
                tokens, labels = shard.take_inputs(tokens), score_shard.take(labels, IGNORE_INDEX)
            for column, x in zip(inputs, (tokens, labels, rows), strict=True):
                column.append(x)
        return MTPInputs(*map(tuple, inputs))

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
