"""From padded batches to packed micro-batches, and back.

Per-token fields of a padded batch are *token-aligned*: index t is about token t (`loss_mask[b, t] = 1`: token t is
trained; `advantages[b, t]` is the advantage of having chosen token t). Packing shifts every per-token field but
`input_ids` one to the left inside its document, so that in a `PackedBatch` index t is about predicting token t + 1, as
the model's output at t is. The last position of a document predicts nothing: its label is -100 and its fields are 0.
Unpacking shifts results to the right again. The shift is done per document and before any split, so that no later step
can pair a document's end with the next one's start. The experts that tokens used are not shifted, as `input_ids`: they
are about reading token t.

`images` of a padded batch are those of each row, a list of `ProcessedImage`s in the order of their placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from archon.models.args.base import ImageFormat
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.spans import ranges
from archon.models.layers.head import IGNORE_INDEX
from archon.models.layers.routed_experts import FIELD, to_replay
from archon.models.lora.mapping import NO_LORA
from archon.models.vision.images import PackedImages, ProcessedImage, multimodal_positions, require_images
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError

IMAGES = "images"
_DERIVED_FIELDS = frozenset({"tokens", "positions", "position_ids", "labels", "cu_seqlens", "max_seqlen"})


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B concatenated documents, T tokens in all, without padding.

    `tokens`, `positions` (from 0 in each document) and `labels` (the next token, or -100) are int64 [T]; `cu_seqlens`
    is int32 [B + 1]. `fields` holds every other entry of the batch, [T, ...] in the shifted alignment of this module,
    or [B, ...] for the names in `per_document`. `source` [T] is each token's index in the flattened padded batch, or in
    the larger pack that this one was split from. `shared` are the common prefixes, if they have been searched for;
    `order` is the order in which the model computes the tokens, if it is another one.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...]
    fields: dict[str, Tensor] = field(default_factory=dict)
    per_document: frozenset[str] = frozenset()
    source: Tensor | None = None
    shared: SharedPrefixes | None = None
    order: TokenReorder | None = None
    lora_ids: tuple[int, ...] | None = None
    """The index of each document's adapter, for a model with several."""
    computed_lora_ids: Tensor | None = None
    """That of each token that the model computes, in its order: int64 on the CPU."""
    routed_experts: Tensor | None = None
    """The experts that each token used when it was generated, int16 [T, L, k], negative where that is not known."""
    rows: tuple[Tensor, Tensor] | None = None
    """The results of `labeled_rows` without and with `only_trained`; None until the batch leaves the CPU."""
    images: tuple[tuple[ProcessedImage, ...], ...] | None = None
    """The pictures of each document; None in a batch of text. Positions are then [3, T]: time, row and column."""
    image_format: ImageFormat | None = None
    """What an image is to the model; None for a model of text."""
    packed_images: PackedImages | None = None
    """The result of `model_images`, on the CPU; None until the batch leaves it."""
    runs_vision_encoder: bool = False
    """Whether any rank's micro-batch of this round has images, so that all must run the tower."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            raise BatchError(f"the batch has no field {name!r}; it has {', '.join(sorted(self.fields)) or 'none'}")
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    @property
    def n_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def n_computed_tokens(self) -> int:
        """How many tokens the model computes: fewer where documents begin alike."""
        return self.n_tokens if self.shared is None else self.shared.rows.numel()

    @property
    def n_documents(self) -> int:
        return len(self.lengths)

    def loss_labels(self) -> Tensor:
        """Return labels [T], -100 where `loss_mask` is 0, so that the head computes only rows that are trained."""
        return self.labels.masked_fill(self["loss_mask"] == 0, IGNORE_INDEX)

    def temperature(self, default: float) -> float | Tensor:
        """Return what divides the logits: [T], the field `temperatures` and `default` where it is 0; without such a
        field `default`."""
        if "temperatures" not in self or "temperatures" in self.per_document:
            return default
        return self["temperatures"].masked_fill(self["temperatures"] == 0, default)

    def check_temperatures(self, default: float) -> None:
        """Check what `temperature` returns, while the batch is on the CPU.

        Raises:
            BatchError: `default` is not positive and finite, or the field `temperatures` has a value that is neither
                0 nor positive and finite.
        """
        if not 0 < default < math.inf:
            raise BatchError(f"temperature is {default}; expected a positive, finite number")
        if "temperatures" not in self or "temperatures" in self.per_document:
            return
        values = self["temperatures"]
        wrong = values[~((values >= 0) & (values < math.inf))]
        if wrong.numel():
            raise BatchError(
                f"field 'temperatures' has {float(wrong[0])}; expected positive, finite numbers, or 0 for the "
                f"temperature of the call, {default:g}"
            )

    def labeled_rows(self, only_trained: bool) -> Tensor:
        """Return the model-order indices of labels, or with `only_trained` of `loss_labels`; int64 on the CPU."""
        return (self.rows or self._find_rows())[only_trained]

    def _find_rows(self) -> tuple[Tensor, Tensor]:
        labeled = (self.in_model_order(self.labels) != IGNORE_INDEX).nonzero().squeeze(1)
        if "loss_mask" not in self or "loss_mask" in self.per_document:
            return labeled, labeled
        return labeled, labeled[self.in_model_order(self["loss_mask"])[labeled] != 0]

    def with_images(self, image_format: ImageFormat | None) -> PackedBatch:
        """Return the batch, which is on the CPU, for a model that takes such images, with the positions of both.

        Raises BatchError for images where the model sees none, for pictures of another model, and for a document whose
        placeholders are not those of its pictures.
        """
        if self.images is None:
            return replace(self, image_format=image_format)
        if image_format is None:
            if any(self.images):
                raise BatchError("the batch has images, and this model sees none; expected a batch of text")
            return replace(self, images=None)
        positions = []
        for document, (tokens, pictures) in enumerate(zip(self.tokens.split(self.lengths), self.images, strict=True)):
            require_images(pictures, image_format)
            sizes = [image.size for image in pictures]
            try:
                found, _ = multimodal_positions(tokens, sizes, image_format.token, image_format.merge_size)
            except BatchError as error:
                raise BatchError(f"document {document} of the batch: {error}") from None
            positions.append(found)
        return replace(self, positions=torch.cat(positions, dim=1), image_format=image_format)

    def without_images(self) -> PackedBatch:
        """Return the batch with its placeholders as text, for a forward that scores nothing."""
        positions = self.positions if self.positions.dim() == 1 else self.positions[0]
        return replace(self, images=None, packed_images=None, positions=positions)

    @property
    def has_images(self) -> bool:
        """Whether a document has an image."""
        return self.images is not None and any(self.images)

    def model_images(self) -> PackedImages | None:
        """Return the images of all documents in the model's order, on the CPU; None without one."""
        if self.packed_images is not None or self.images is None or not any(self.images):
            return self.packed_images
        assert self.image_format is not None
        documents = range(self.n_documents) if self.order is None else self.order.documents
        pictures = [image for document in documents for image in self.images[document]]
        tokens = self.in_model_order(self.tokens)
        if self.shared is not None:
            tokens, numbers = tokens[self.shared.rows], self._token_images()[self.shared.rows]
            pictures = [pictures[number] for number in numbers[numbers >= 0].unique_consecutive().tolist()]
        return PackedImages.from_images(tokens, pictures, self.image_format)

    def _token_images(self) -> Tensor:
        """Return which of all documents' pictures each token stands for, int64 [T]; -1 for text."""
        assert self.images is not None and self.image_format is not None
        areas = [height * width for pictures in self.images for height, width in (image.size for image in pictures)]
        numbers = torch.full_like(self.tokens, -1)
        merged = torch.tensor(areas) // self.image_format.merge_size**2
        numbers[self.tokens == self.image_format.token] = torch.arange(len(areas)).repeat_interleave(merged)
        return numbers

    def image_ids(self) -> Tensor:
        """Return numbers [T] that are equal for tokens of equal pictures; -1 for text."""
        assert self.images is not None
        numbers: dict[str, int] = {}
        distinct = [numbers.setdefault(image.digest, len(numbers)) for pictures in self.images for image in pictures]
        return torch.tensor([*distinct, -1])[self._token_images()]

    def in_model_order(self, x: Tensor) -> Tensor:
        """Return a per-token tensor [T, ...] of this pack in the model's order."""
        return x if self.order is None else x.index_select(0, self.order.rows)

    def model_positions(self) -> Tensor:
        """Return the positions, [T] or [3, T], in the model's order."""
        return self.positions if self.order is None else self.positions.index_select(-1, self.order.rows)

    def in_pack_order(self, x: Tensor) -> Tensor:
        """Undo `in_model_order`, with gradient."""
        return x if self.order is None else x.index_select(0, self.order.inverse)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`; copied asynchronously from pinned memory if that is a GPU."""
        if self.tokens.device == device:
            return self
        names = ("tokens", "positions", "labels", "cu_seqlens")
        tensors: dict[str, Any] = {name: to_device_async(getattr(self, name), device) for name in names}
        return replace(
            self,
            **tensors,
            fields={name: to_device_async(x, device) for name, x in self.fields.items()},
            routed_experts=None if self.routed_experts is None else to_device_async(self.routed_experts, device),
            shared=None if self.shared is None else self.shared.to(device),
            order=None if self.order is None else self.order.to(device),
            rows=self.rows or (self._find_rows() if self.tokens.device.type == "cpu" else None),
            packed_images=self.model_images(),
        )

    def sorted_by_length(self) -> PackedBatch:
        """Return the batch, which is on the CPU, for a model that computes documents by length."""
        if self.shared is not None:
            return self
        return replace(self, order=TokenReorder.by_length(self.lengths, self.lora_ids))

    def with_loras(self, n_loras: int) -> PackedBatch:
        """Return the batch, which is on the CPU, for a model with several adapters: `lora` is the index of each
        document's, or `NO_LORA`. Raises BatchError without that field or for an index outside of the adapters."""
        if "lora" not in self.per_document or self["lora"].is_floating_point():
            raise BatchError(
                "the batch does not say which of the model's adapters each document has; expected a field 'lora', "
                "integers [B], indices into lora.loras"
            )
        ids = self["lora"].tolist()
        wrong = [index for index in ids if not (index == NO_LORA or 0 <= index < n_loras)]
        if wrong:
            raise BatchError(
                f"adapter {wrong[0]} of a document is none of the model's; expected 0 to {n_loras - 1}, or "
                f"{NO_LORA} for none"
            )
        return replace(self, lora_ids=tuple(ids))

    def with_computed_lora_ids(self) -> PackedBatch:
        """Return the batch, which is on the CPU and whose order is settled, with `computed_lora_ids`."""
        ids = self.token_lora_ids()
        return replace(
            self, computed_lora_ids=self.in_model_order(ids if self.shared is None else ids[self.shared.rows])
        )

    def token_lora_ids(self) -> Tensor:
        """Return the index [T] of each token's adapter, on the CPU, in the order of the pack."""
        return torch.tensor(self.lora_ids).repeat_interleave(torch.tensor(self.lengths))

    def by_lora(self) -> Iterator[tuple[int, PackedBatch]]:
        """Yield the index of each adapter of documents of this pack, and the pack of these documents; `source` has the
        positions of its tokens in this one."""
        assert self.lora_ids is not None
        starts = [0, *accumulate(self.lengths)]
        for index in sorted({*self.lora_ids}):
            yield index, _take(self, [d for d, own in enumerate(self.lora_ids) if own == index], starts)


@dataclass(frozen=True, eq=False)
class TokenReorder:
    """Another order of a pack's documents: `documents`, their `lengths` and `cu_seqlens`, int32 [B + 1], in it.

    `rows` int64 [T] permutes the pack's tokens into this order, `inverse` int64 [T] back.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    rows: Tensor
    inverse: Tensor

    @classmethod
    def by_length(cls, lengths: Sequence[int], lora_ids: Sequence[int] | None = None) -> TokenReorder | None:
        """Return an order by ascending length, in which documents of one length are one batch for attention; None if
        they are nearly adjacent already.

        For the many short documents of reinforcement learning that is a handful of calls instead of hundreds. Documents
        of several `lora_ids` are sorted by adapter first, so that layers need not sort their tokens.
        """
        keys = lengths if lora_ids is None else list(zip(lora_ids, lengths, strict=True))
        grouped = lora_ids is None or list(lora_ids) == sorted(lora_ids)
        if grouped and sum(1 for _ in groupby(keys)) <= 2 * len({*keys}):
            return None
        given = torch.tensor(lengths)
        order = torch.tensor(sorted(range(len(lengths)), key=lambda document: keys[document]))
        sorted_lengths = given[order]
        bounds = torch.nn.functional.pad(sorted_lengths.cumsum(0), (1, 0))
        shift = (given.cumsum(0) - given)[order] - bounds[:-1]
        rows = torch.arange(int(bounds[-1])) + torch.repeat_interleave(shift, sorted_lengths)
        return cls(tuple(order.tolist()), tuple(sorted_lengths.tolist()), bounds.int(), rows, torch.argsort(rows))

    def to(self, device: torch.device) -> TokenReorder:
        """Return the order with its tensors on `device`."""
        tensors = (to_device_async(x, device) for x in (self.cu_seqlens, self.rows, self.inverse))
        return TokenReorder(self.documents, self.lengths, *tensors)


def pack(batch: Mapping[str, Any]) -> PackedBatch:
    """Pack all documents of a padded batch, in their order, and shifts per-token fields.

    `batch` holds `input_ids` int [B, S], `attention_mask` bool or 0/1 [B, S] (padding on either side, never inside)
    and any other tensors of shape [B, S, ...] (per token) or [B] (per document); of these `routed_experts` [B, S, L, k]
    are the experts that tokens used, see `archon.models.layers.routed_experts`. It may hold `images`, of each row a
    list of
    `ProcessedImage`s. Tensors are moved to the CPU, where the engine keeps a batch until a micro-batch runs.

    Raises BatchError naming the wrong field or row.
    """
    input_ids, mask = (_require_field(batch, name).cpu() for name in ("input_ids", "attention_mask"))
    if input_ids.ndim != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise BatchError(f"input_ids must be integers [B, S] with B >= 1 and S >= 1, got {_describe(input_ids)}")
    if mask.shape != input_ids.shape:
        raise BatchError(f"attention_mask is {tuple(mask.shape)}, but input_ids is {tuple(input_ids.shape)}")
    lengths, starts = _document_spans(mask != 0)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    positions = torch.arange(len(rows)) - cu_seqlens[rows]
    source = rows * input_ids.shape[1] + starts[rows] + positions
    last = cu_seqlens[1:] - 1
    following = source + 1
    following[last] = source[last]  # any valid index: these positions are overwritten

    def shifted(x: Tensor, fill: int) -> Tensor:
        out = x.flatten(0, 1)[following]
        out[last] = fill
        return out

    fields: dict[str, Tensor] = {}
    per_document: set[str] = set()
    for name, value in batch.items():
        if name in ("input_ids", "attention_mask", FIELD, IMAGES):
            continue
        if name in _DERIVED_FIELDS:
            raise BatchError(
                f"field {name!r} is made by archon from input_ids; leave it out (loss_mask says what is trained)"
            )
        value = _require_field(batch, name).cpu()
        if value.ndim >= 2 and value.shape[:2] == input_ids.shape:
            fields[name] = shifted(value, 0)
        elif value.ndim == 1 and value.shape[0] == input_ids.shape[0]:
            fields[name] = value
            per_document.add(name)
        else:
            raise BatchError(
                f"field {name!r} is {_describe(value)}; expected {tuple(input_ids.shape)} for a value per token or "
                f"({input_ids.shape[0]},) for one per document"
            )
    return PackedBatch(
        tokens=input_ids.reshape(-1)[source].long(),
        positions=positions,
        labels=shifted(input_ids.long(), IGNORE_INDEX),
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=int(lengths.max()),
        lengths=tuple(lengths.tolist()),
        fields=fields,
        per_document=frozenset(per_document),
        source=source,
        images=_row_images(batch[IMAGES], len(lengths)) if IMAGES in batch else None,
        routed_experts=_packed_experts(batch, source),
    )


def _row_images(images: Any, count: int) -> tuple[tuple[ProcessedImage, ...], ...]:
    """Return the pictures of each row. Raises BatchError unless there is a list of them for each."""
    rows = list(images) if isinstance(images, list | tuple) else None
    if rows is None or any(not isinstance(row, list | tuple) for row in rows):
        raise BatchError(f"images is a {type(images).__name__}; expected of each of {count} rows a list of pictures")
    if len(rows) != count:
        raise BatchError(f"images has {len(rows)} lists of pictures; expected one for each of {count} rows")
    for row, pictures in enumerate(rows):
        wrong = [type(each).__name__ for each in pictures if not isinstance(each, ProcessedImage)]
        if wrong:
            raise BatchError(f"images of row {row} has a {wrong[0]}; expected pictures, see archon.data.images")
    return tuple(tuple(row) for row in rows)


def _packed_experts(batch: Mapping[str, Any], source: Tensor) -> Tensor | None:
    """Return the experts of the tokens at `source` [T] of the flattened batch, as routers are given them; not shifted,
    as they are about reading a token. None where the batch has none."""
    if FIELD not in batch:
        return None
    record, shape = _require_field(batch, FIELD).cpu(), tuple(batch["input_ids"].shape)
    if record.ndim != 4 or tuple(record.shape[:2]) != shape:
        raise BatchError(f"field {FIELD!r} is {_describe(record)}; expected {shape} by layers by experts of a token")
    return to_replay(record.flatten(0, 1)[source])


def split(packed: PackedBatch, max_tokens: int) -> list[PackedBatch]:
    """Split a pack between documents into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing [Johnson 1973]: at most 11/9 of the fewest possible micro-batches (plus a constant), and
    deterministic. Each micro-batch keeps its documents in their original order, and its `source` holds the index of
    each of its tokens in `packed`. Raises BatchError when a document is longer than `max_tokens`.
    """
    starts = [0, *accumulate(packed.lengths)]
    return [_take(packed, documents, starts) for documents in first_fit_decreasing(packed.lengths, max_tokens)]


def merge(packed: PackedBatch, micro_batches: Sequence[PackedBatch], values: Sequence[Tensor]) -> Tensor:
    """Undo `split` for per-token results: a [t, ...] tensor of each micro-batch to [T, ...] in `packed`'s order."""
    out = values[0].new_zeros((packed.n_tokens, *values[0].shape[1:]))
    for micro_batch, value in zip(micro_batches, values, strict=True):
        assert micro_batch.source is not None
        out[to_device_async(micro_batch.source, out.device)] = value
    return out


def unpack(packed: PackedBatch, values: Tensor, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Undo `pack` for per-token results: [T, ...] to token-aligned [B, S, ...], zero at first tokens and padding."""
    assert packed.source is not None
    out = values.new_zeros((shape[0] * shape[1], *values.shape[1:]))
    predicts = torch.ones(packed.n_tokens, dtype=torch.bool)
    predicts[packed.cu_seqlens[1:].long() - 1] = False
    out[(packed.source[predicts] + 1).to(out.device)] = values[predicts.to(out.device)]
    return out.unflatten(0, tuple(shape))


def first_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return bins of indices whose lengths sum to at most `limit`; indices ascend in a bin, bins by first index."""
    for index, length in enumerate(lengths):
        if length > limit:
            raise BatchError(
                f"document {index} has {length} tokens, more than max_tokens_per_mb = {limit}; "
                f"raise max_tokens_per_mb to at least {max(lengths)} or filter long documents"
            )
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(limit)
        bins[place].append(index)
        room[place] -= lengths[index]
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def _take(packed: PackedBatch, documents: list[int], starts: list[int]) -> PackedBatch:
    """Return the pack of these documents of `packed`, in this order."""
    lengths = [packed.lengths[d] for d in documents]
    index = torch.from_numpy(ranges([starts[d] for d in documents], lengths))
    chosen = torch.tensor(documents)
    images = None if packed.images is None else tuple(packed.images[d] for d in documents)
    positions = packed.positions[..., index]
    return PackedBatch(
        tokens=packed.tokens[index],
        positions=positions if positions.dim() == 1 or any(images or ()) else positions[0],
        labels=packed.labels[index],
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        fields={name: x[chosen if name in packed.per_document else index] for name, x in packed.fields.items()},
        per_document=packed.per_document,
        source=index,
        lora_ids=None if packed.lora_ids is None else tuple(packed.lora_ids[d] for d in documents),
        images=images,
        image_format=packed.image_format,
        routed_experts=None if packed.routed_experts is None else packed.routed_experts[index],
    )


def _document_spans(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return length [B] and first column [B] of each row's document. Raises BatchError for an empty row or a gap."""
    lengths = mask.sum(1)
    starts = mask.int().argmax(1)
    ends = mask.shape[1] - mask.flip(1).int().argmax(1)
    empty = (lengths == 0).nonzero()
    if len(empty):
        raise BatchError(f"row {int(empty[0])} of attention_mask has no token; leave empty rows out of the batch")
    holes = (ends - starts != lengths).nonzero()
    if len(holes):
        raise BatchError(f"row {int(holes[0])} of attention_mask has a gap; padding is allowed only at either end")
    return lengths, starts


def _require_field(batch: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in batch:
        raise BatchError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
    value = batch[name]
    if not isinstance(value, Tensor):
        raise BatchError(f"field {name!r} is a {type(value).__name__}; expected a tensor")
    return value


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
