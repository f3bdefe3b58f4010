"""Split a batch into micro-batches, and choose the order in which the model computes their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch, pack, split
from archon.models.args.base import ImageFormat
from archon.models.attention.prefix.plan import SharedPrefixes, shared_prefixes
from archon.models.layers.head import IGNORE_INDEX
from archon.models.vision.images import PackedImages
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError

Batch = Mapping[str, Any] | PackedBatch


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Order in which the model computes the T tokens of a micro-batch.

    Attributes:
        documents: document indices in compute order.
        lengths: document lengths in compute order.
        cu_seqlens: int32 [B + 1], document boundaries in compute order.
        rows: int64 [U], the pack index of each computed token; None for pack order.
        inverse: int64 [T], inverse of `rows` if `rows` is a permutation; the head's scores are then in compute order.
            None: they are in pack order.
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
    """Documents of one forward and the order of their tokens, on the CPU.

    `dropout_seed` is the seed of LoRA dropout in this step; None without dropout and outside training.
    """

    documents: PackedBatch
    order: TokenOrder
    dropout_seed: int | None = None

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


def packed_images(mb: MicroBatch, image_format: ImageFormat) -> PackedImages:
    """Return the images of a micro-batch in compute order, on the CPU."""
    documents, order = mb.documents, mb.order
    assert documents.images is not None
    images = [image for document in order.documents for image in documents.images[document]]
    tokens = order.computed(documents.tokens)
    if order.prefixes is not None:
        numbers = _token_images(documents, image_format)[order.prefixes.rows]
        images = [images[number] for number in numbers[numbers >= 0].unique_consecutive().tolist()]
    return PackedImages.from_images(tokens, images, image_format)
