"""Padded batches to packed micro-batches, and back.

Per-token fields of a padded batch are *token-aligned*: index t is about token t. For example `loss_mask[b, t] = 1`
trains token t, and `advantages[b, t]` is the advantage of choosing token t. Packing shifts every per-token field except
`input_ids` one to the left inside its document. Index t of a `PackedBatch` is therefore about predicting token t + 1,
like the model's output at t. The last position of a document predicts nothing: its label is -100 and its fields are 0.
Unpacking shifts results to the right again. The shift is done per document before any split, so a document's end is
never paired with the next document's start. `routed_experts` are not shifted: they are about reading token t.

`images` of a padded batch lists the `ProcessedImage`s of each row in the order of their placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from archon.models.args.base import ImageFormat
from archon.models.attention.spans import ranges
from archon.models.layers.head import IGNORE_INDEX
from archon.models.layers.routed_experts import FIELD, to_replay
from archon.models.lora.mapping import NO_LORA
from archon.models.vision.images import ProcessedImage, multimodal_positions, require_images
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError

IMAGES = "images"
STRUCTURE = ("input_ids", "attention_mask", IMAGES, FIELD)
"""Columns of a padded batch that become attributes of a `PackedBatch`; all others become fields."""
_DERIVED_FIELDS = frozenset({"tokens", "positions", "position_ids", "labels", "cu_seqlens", "max_seqlen"})


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B concatenated documents, T tokens in all, without padding.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], from 0 in each document; [3, T] (time, row, column) if a document has an image.
        labels: int64 [T], the next token, or -100.
        cu_seqlens: int32 [B + 1], document boundaries.
        max_seqlen: length of the longest document.
        lengths: document lengths.
        fields: every other entry of the batch, [T, ...] in the shifted alignment, or [B, ...] if in `per_document`.
        per_document: names of the fields with one value per document.
        source: int64 [T], each token's index in the flattened padded batch, or in the larger pack before a split.
        lora_ids: the LoRA index of each document in a multi-LoRA model.
        routed_experts: int16 [T, L, k], the experts to replay for each token; negative if unknown.
        images: the images of each document; None in a text batch.
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
    lora_ids: tuple[int, ...] | None = None
    routed_experts: Tensor | None = None
    images: tuple[tuple[ProcessedImage, ...], ...] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            fields = ", ".join(sorted(self.fields)) or "tokens"
            raise BatchError(f"the batch has no field {name!r}, only {fields}; add it with shape [B, S] or [B]")
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    @property
    def n_tokens(self) -> int:
        """The number of tokens T."""
        return self.tokens.numel()

    @property
    def n_documents(self) -> int:
        """The number of documents B."""
        return len(self.lengths)

    @property
    def has_images(self) -> bool:
        """Whether a document has an image."""
        return self.images is not None and any(self.images)

    def loss_labels(self) -> Tensor:
        """Return labels [T], -100 where `loss_mask` is 0, so that the head skips untrained rows."""
        return self.labels.masked_fill(self["loss_mask"] == 0, IGNORE_INDEX)

    def mtp_targets(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return token t + layer, and the trained label of that token, of each token t; both int64 [T].

        After the end of its document a token is itself, with the label -100.
        """
        lengths = self.cu_seqlens.diff()
        ends = self.cu_seqlens[1:].repeat_interleave(lengths, output_size=self.n_tokens)
        index = torch.arange(self.n_tokens, device=self.tokens.device)
        following = torch.where(index + layer < ends, index + layer, index)
        return self.tokens[following], self.loss_labels()[following].masked_fill(following == index, IGNORE_INDEX)

    def temperature(self, default: float) -> float | Tensor:
        """Return the field `temperatures` [T] with zeros replaced by `default`, or `default` without the field."""
        if "temperatures" not in self or "temperatures" in self.per_document:
            return default
        return self["temperatures"].masked_fill(self["temperatures"] == 0, default)

    def check_temperatures(self, default: float) -> None:
        """Check the temperatures of a batch on the CPU.

        Raises:
            BatchError: `default` is not positive and finite, or a value of the field `temperatures` is neither 0 nor
                positive and finite.
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

    def with_images(self, image_format: ImageFormat | None) -> PackedBatch:
        """Return the batch with the positions of its images; None is the format of a text model.

        Raises:
            BatchError: a text model receives images, an image was processed for another model, or a document's
                placeholders do not match its images.
        """
        if self.images is None:
            return self
        if image_format is None:
            if any(self.images):
                raise BatchError("the batch has images, and this is a text model; expected a text batch")
            return replace(self, images=None)
        positions = []
        for document, (tokens, images) in enumerate(zip(self.tokens.split(self.lengths), self.images, strict=True)):
            require_images(images, image_format)
            sizes = [image.size for image in images]
            try:
                axes, _ = multimodal_positions(tokens, sizes, image_format.token, image_format.merge_size)
            except BatchError as error:
                raise BatchError(f"document {document} of the batch: {error}") from None
            positions.append(axes)
        return replace(self, positions=torch.cat(positions, dim=1))

    def with_loras(self, n_loras: int) -> PackedBatch:
        """Return the batch with `lora_ids` from its field `lora`, indices below `n_loras` or `NO_LORA`.

        Raises:
            BatchError: the field is missing, or an index is out of range.
        """
        if "lora" not in self.per_document or self["lora"].is_floating_point():
            raise BatchError(
                "the batch selects no LoRA for its documents; expected a field 'lora', integers [B], indices into "
                "lora.loras"
            )
        ids = self["lora"].tolist()
        wrong = [index for index in ids if not (index == NO_LORA or 0 <= index < n_loras)]
        if wrong:
            raise BatchError(
                f"unknown LoRA index {wrong[0]}; expected 0 to {n_loras - 1}, or {NO_LORA} for the base model"
            )
        return replace(self, lora_ids=tuple(ids))

    def token_lora_ids(self) -> Tensor:
        """Return the LoRA index [T] of each token, on the CPU."""
        return torch.tensor(self.lora_ids).repeat_interleave(torch.tensor(self.lengths))

    def by_lora(self) -> Iterator[tuple[int, PackedBatch]]:
        """Yield each LoRA index and the pack of its documents, with `source` indices into this pack."""
        assert self.lora_ids is not None
        starts = [0, *accumulate(self.lengths)]
        for index in sorted({*self.lora_ids}):
            yield index, _select(self, [d for d, lora_id in enumerate(self.lora_ids) if lora_id == index], starts)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`; pinned memory makes the copy to a GPU asynchronous."""
        if self.tokens.device == device:
            return self
        names = ("tokens", "positions", "labels", "cu_seqlens")
        tensors: dict[str, Any] = {name: to_device_async(getattr(self, name), device) for name in names}
        fields = {name: to_device_async(x, device) for name, x in self.fields.items()}
        experts = None if self.routed_experts is None else to_device_async(self.routed_experts, device)
        return replace(self, **tensors, fields=fields, routed_experts=experts)


def pack(batch: Mapping[str, Any]) -> PackedBatch:
    """Pack all documents of a padded batch in order and shift per-token fields.

    Args:
        batch: `input_ids` int [B, S], `attention_mask` bool or 0/1 [B, S] with padding at either end of a row, and any
            other tensors [B, S, ...] (per token) or [B] (per document). `routed_experts` [B, S, L, k] are experts to
            replay, see `archon.models.layers.routed_experts`; `images` lists the `ProcessedImage`s of each row.

    Returns:
        The pack on the CPU; a micro-batch moves to the device when it runs.

    Raises:
        BatchError: names the wrong field or row.
    """
    input_ids, mask = (_require_field(batch, name).cpu() for name in ("input_ids", "attention_mask"))
    if input_ids.ndim != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise BatchError(f"input_ids must be integers [B, S] with B >= 1 and S >= 1, got {_describe(input_ids)}")
    if mask.shape != input_ids.shape:
        raise BatchError(f"attention_mask is {tuple(mask.shape)}, but input_ids is {tuple(input_ids.shape)}")
    # 1. Find the documents' tokens in the padded batch.
    lengths, starts = _document_spans(mask != 0)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    positions = torch.arange(len(rows)) - cu_seqlens[rows]
    source = rows * input_ids.shape[1] + starts[rows] + positions
    # 2. Shift every per-token field to the left inside its document.
    last = cu_seqlens[1:] - 1
    packed = PackedBatch(
        tokens=input_ids.reshape(-1)[source].long(),
        positions=positions,
        labels=_shifted(input_ids.long(), source, last, IGNORE_INDEX),
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=int(lengths.max()),
        lengths=tuple(lengths.tolist()),
        source=source,
        images=_row_images(batch[IMAGES], len(lengths)) if IMAGES in batch else None,
        routed_experts=_packed_experts(batch, source),
    )
    return add_fields(packed, batch, input_ids.shape)


def add_fields(packed: PackedBatch, batch: Mapping[str, Any], shape: torch.Size) -> PackedBatch:
    """Return a pack with all columns of its padded batch as fields; per-token fields are shifted.

    Args:
        packed: the result of `pack`.
        batch: tensors [B, S, ...] (per token) or [B] (per document). Columns that a pack has as attributes are skipped.
        shape: the shape [B, S] of the padded batch.

    Raises:
        BatchError: a column has another shape, or the name of an attribute that `pack` derives.
    """
    assert packed.source is not None
    last = packed.cu_seqlens[1:].long() - 1
    fields, per_document = dict(packed.fields), set(packed.per_document)
    for name in batch:
        if name in STRUCTURE:
            continue
        if name in _DERIVED_FIELDS:
            raise BatchError(
                f"archon derives field {name!r} from input_ids; leave it out (loss_mask marks trained tokens)"
            )
        value = _require_field(batch, name).cpu()
        if value.ndim >= 2 and value.shape[:2] == shape:
            fields[name] = _shifted(value, packed.source, last, 0)
        elif value.ndim == 1 and value.shape[0] == shape[0]:
            fields[name] = value
            per_document.add(name)
        else:
            raise BatchError(
                f"field {name!r} is {_describe(value)}; expected {tuple(shape)} for a value per token or ({shape[0]},) "
                "for one per document"
            )
    return replace(packed, fields=fields, per_document=frozenset(per_document))


def _shifted(x: Tensor, source: Tensor, last: Tensor, fill: int) -> Tensor:
    """Return the next token's value of x [B, S, ...] for each packed token, and `fill` for last tokens."""
    following = source + 1
    following[last] = source[last]  # any valid index, since these positions are overwritten
    out = x.flatten(0, 1)[following]
    out[last] = fill
    return out


def _row_images(images: Any, count: int) -> tuple[tuple[ProcessedImage, ...], ...]:
    """Return the images of each row; raise BatchError unless every row has a list of them."""
    rows = list(images) if isinstance(images, list | tuple) else None
    if rows is None or any(not isinstance(row, list | tuple) for row in rows):
        raise BatchError(f"images is a {type(images).__name__}; expected a list of images for each of {count} rows")
    if len(rows) != count:
        raise BatchError(f"images has {len(rows)} lists of images; expected one for each of {count} rows")
    for number, row in enumerate(rows):
        wrong = [type(image).__name__ for image in row if not isinstance(image, ProcessedImage)]
        if wrong:
            raise BatchError(f"images of row {number} has a {wrong[0]}; expected images, see archon.data.images")
    return tuple(tuple(row) for row in rows)


def _packed_experts(batch: Mapping[str, Any], source: Tensor) -> Tensor | None:
    """Return the experts to replay for the tokens at `source` [T], unshifted; None without the field."""
    if FIELD not in batch:
        return None
    record, shape = _require_field(batch, FIELD).cpu(), tuple(batch["input_ids"].shape)
    if record.ndim != 4 or tuple(record.shape[:2]) != shape:
        raise BatchError(
            f"field {FIELD!r} is {_describe(record)}; expected ({shape[0]}, {shape[1]}, layers, experts per token)"
        )
    return to_replay(record.flatten(0, 1)[source])


def split(packed: PackedBatch, max_tokens: int) -> list[PackedBatch]:
    """Split a pack between documents into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing [Johnson 1973] is deterministic and needs at most 11/9 of the fewest possible micro-batches,
    plus a constant. A micro-batch keeps its documents in order, and its `source` indexes `packed`.

    Raises:
        BatchError: a document is longer than `max_tokens`.
    """
    starts = [0, *accumulate(packed.lengths)]
    return [_select(packed, documents, starts) for documents in first_fit_decreasing(packed.lengths, max_tokens)]


def merge(packed: PackedBatch, micro_batches: Sequence[PackedBatch], values: Sequence[Tensor]) -> Tensor:
    """Undo `split` for per-token results: concatenate [t, ...] tensors to [T, ...] in pack order."""
    out = values[0].new_zeros((packed.n_tokens, *values[0].shape[1:]))
    for micro_batch, value in zip(micro_batches, values, strict=True):
        assert micro_batch.source is not None
        out[to_device_async(micro_batch.source, out.device)] = value
    return out


def unpack(packed: PackedBatch, values: Tensor, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Undo `pack` for results [T, ...]: token-aligned [B, S, ...], 0 at first tokens and padding."""
    assert packed.source is not None
    out = values.new_zeros((shape[0] * shape[1], *values.shape[1:]))
    predicts = torch.ones(packed.n_tokens, dtype=torch.bool)
    predicts[packed.cu_seqlens[1:].long() - 1] = False
    out[(packed.source[predicts] + 1).to(out.device)] = values[predicts.to(out.device)]
    return out.unflatten(0, tuple(shape))


def first_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return bins of indices with total length at most `limit`, ascending within and across bins."""
    for index, length in enumerate(lengths):
        if length > limit:
            raise BatchError(
                f"document {index} has {length} tokens, more than max_tokens_per_mb = {limit}; "
                f"raise max_tokens_per_mb to at least {max(lengths)} or filter long documents"
            )
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = next((b for b, tokens in enumerate(free) if tokens >= lengths[index]), len(bins))
        if target == len(bins):
            bins.append([])
            free.append(limit)
        bins[target].append(index)
        free[target] -= lengths[index]
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def select(packed: PackedBatch, documents: Sequence[int]) -> PackedBatch:
    """Return the pack of some documents; its `source` indexes `packed`."""
    return _select(packed, list(documents), [0, *accumulate(packed.lengths)])


def _select(packed: PackedBatch, documents: list[int], starts: list[int]) -> PackedBatch:
    """Return the pack of these documents of `packed`, in this order."""
    lengths = [packed.lengths[d] for d in documents]
    index = torch.from_numpy(ranges([starts[d] for d in documents], lengths))
    document_index = torch.tensor(documents)
    images = None if packed.images is None else tuple(packed.images[d] for d in documents)
    positions = packed.positions[..., index]
    return PackedBatch(
        tokens=packed.tokens[index],
        positions=positions if positions.dim() == 1 or any(images or ()) else positions[0],
        labels=packed.labels[index],
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        fields={name: x[document_index if name in packed.per_document else index] for name, x in packed.fields.items()},
        per_document=packed.per_document,
        source=index,
        lora_ids=None if packed.lora_ids is None else tuple(packed.lora_ids[d] for d in documents),
        routed_experts=None if packed.routed_experts is None else packed.routed_experts[index],
        images=images,
    )


def _document_spans(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the length [B] and first column [B] of each row's document; raise BatchError for a gap."""
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
