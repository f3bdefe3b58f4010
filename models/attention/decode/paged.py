"""Attention over a paged key-value cache: decoding with the modules that train.

The tokens of a forward are one new token per decoding sequence, then chunks of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.decode.page_batches import PageBatch, attend_to_pages, page_batches
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import AttentionMeta, PackedAttention, Scan
from archon.models.attention.packed.blockwise import batched_attention
from archon.models.attention.packed.documents import PackedDocuments, cu_seqlens_from_lengths
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu import decode_kernel
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.transfer import to_device_async


@dataclass
class DecodeRows:
    """Sequences that add one token in this forward, as host arrays.

    Of sequences with equal tokens only one is computed; its duplicates copy its keys and values.
    """

    pages: np.ndarray  # int64 [B, max_pages], the pages of each sequence, in order
    lengths: np.ndarray  # int64 [B], tokens of each sequence, including the new one
    duplicate_pages: np.ndarray | None = None  # int64 [C, max_pages], the pages of each duplicate
    duplicate_rows: np.ndarray | None = None  # int64 [C], the row that each duplicate copies
    states: np.ndarray | None = None  # int64 [B], the slot of each sequence's state
    duplicate_states: np.ndarray | None = None  # int64 [C], the slot of each duplicate's state
    offsets: np.ndarray | None = None  # int64 [B], M-RoPE position minus token index, after images


@dataclass
class PrefillChunk:
    """Consecutive prompt tokens of one sequence."""

    start: int  # tokens of the sequence that are cached already
    length: int  # tokens of this chunk
    pages: Sequence[int]  # the sequence's pages, enough for start + length tokens
    document_length: int  # length of the full prompt, which dynamic and LongRoPE frequencies depend on
    state: int = -1  # slot of the sequence's state
    positions: np.ndarray | None = None  # int64 [3, length], time, row and column, where there are images


class CachingAttention(AttentionMeta):
    """Attention that writes the new tokens to a cache.

    For multi-LoRA models, the cache stores 0 for keys and values that are not finite, since attention multiplies masked
    values by 0, and pages pass to other sequences.
    """

    @property
    def overflowed(self) -> Tensor | None:
        """Whether the keys or values of a token are not finite: bool [T] without padding; None for other models."""
        return ~torch.stack(self._sums).isfinite().all(0) if self._sums else None

    @cached_property
    def _sums(self) -> list[Tensor]:
        """Sums [T] of new keys or values, which are finite only if all addends are."""
        return []

    def finite_rows(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return new rows [T, heads, features] of one layer as the cache stores them."""
        if self.lora_mapping is None:
            return tuple(rows)
        wide = torch.promote_types(rows[0].dtype, torch.float32)
        self._sums.extend(x.sum((1, 2), dtype=wide) for x in rows)
        return tuple(x.nan_to_num(0, 0, 0) for x in rows)


class PagedAttention(CachingAttention):
    """One forward of the generator: the `decode` rows first, then the tokens of `chunks`, in order.

    Args:
        cache: the pool; new keys and values are written to it before attention.
        decode: sequences that add one token each.
        chunks: parts of prompts; chunks that start at 0 attend as packed documents.
        attn_type: backend of the chunks that start at 0; pages do not use it.
        padded_length: rows of the forward, if more than its tokens; the output of padding is 0.
    """

    def __init__(
        self,
        cache: PagedCache,
        decode: DecodeRows,
        chunks: Sequence[PrefillChunk] = (),
        attn_type: str = "auto",
        padded_length: int | None = None,
    ) -> None:
        self.cache, self.decode, self.chunks = cache, decode, list(chunks)
        self.n_decode = len(decode.lengths)
        self.device = cache.device
        self._positions = np.concatenate(
            [decode.lengths - 1, *(np.arange(c.start, c.start + c.length) for c in self.chunks)]
        )
        self._n_padding = 0 if padded_length is None else padded_length - len(self._positions)
        assert self._n_padding >= 0, f"{len(self._positions)} tokens do not fit in {padded_length} rows"
        self._duplicates: Tensor | None = None
        if decode.duplicate_rows is not None and decode.duplicate_rows.size:
            self._duplicates = self._on_device(decode.duplicate_rows)
        self._rows = self._cache_rows()
        self._batches: dict[int | None, list[PageBatch]] = {}
        self._packed: PackedAttention | None = None
        if new_prompts := tuple(chunk.length for chunk in self.chunks if chunk.start == 0):
            self._packed = PackedAttention.from_lengths(new_prompts, self.device, attn_type)

    @property
    def positions(self) -> Tensor:
        """int64 [T], position of every token of this forward in its sequence; 0 for padding.

        [3, T], time, row and column, where a chunk's prompt has images.
        """
        positions = self._positions.copy()
        if self.decode.offsets is not None:
            positions[: self.n_decode] += self.decode.offsets
        if any(chunk.positions is not None for chunk in self.chunks):
            positions, first = np.tile(positions, (3, 1)), self.n_decode
            for chunk in self.chunks:
                if chunk.positions is not None:
                    positions[:, first : first + chunk.length] = chunk.positions
                first += chunk.length
        padding = [(0, 0)] * (positions.ndim - 1) + [(0, self._n_padding)]
        return self._on_device(np.pad(positions, padding))

    def prepare(self, hidden: Tensor) -> None:
        """See `AttentionMeta.prepare`."""
        if self._packed is not None:
            self._packed.prepare(hidden)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """See `AttentionMeta.document_lengths`."""
        lengths = [self.decode.lengths, *(np.full(chunk.length, chunk.document_length) for chunk in self.chunks)]
        lengths.append(np.ones(self._n_padding, dtype=np.int64))
        return torch.from_numpy(np.concatenate(lengths))

    def _cache_rows(self) -> dict[int, Tensor]:
        """Return `PagedCache.token_rows` of every token of this forward, then of the duplicates."""
        size, decode = self.cache.page_size, self.decode
        last = decode.lengths - 1
        pages, positions = [decode.pages[np.arange(self.n_decode), last // size]], self._positions
        for chunk in self.chunks:
            span = np.arange(chunk.start, chunk.start + chunk.length)
            pages.append(np.asarray(chunk.pages, dtype=np.int64)[span // size])
        if self._duplicates is not None:
            assert decode.duplicate_pages is not None
            duplicates = last[decode.duplicate_rows]
            pages.append(decode.duplicate_pages[np.arange(len(duplicates)), duplicates // size])
            positions = np.concatenate([positions, duplicates])
        return self.cache.token_rows(np.concatenate(pages), positions % size)

    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        q, k, v = self._prepare(layer, q, k, v)
        outs, first = list[Tensor](), self.n_decode
        if first:
            outs.append(self._attend_pages(layer, q[:first], spec))
        if self.chunks:
            outs.append(self._attend_chunks(layer, q[first:], k[first:], v[first:], spec))
        return self._concat_outputs(outs)

    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """See `AttentionMeta.run_recurrence`."""
        outs, first = list[Tensor](), 0
        for slots, fresh, documents in self._state_groups:
            last = first + sum(documents.lengths)
            before = self.cache.states.read(layer, slots, fresh)
            out, after = scan([x[first:last] for x in rows], weights, documents, before)
            outs.append(out)
            self.cache.states.write(layer, slots, after)
            if first == 0 and self._duplicates is not None:
                assert self.decode.duplicate_states is not None
                copies = self._on_device(self.decode.duplicate_states)
                self.cache.states.write(layer, copies, tuple(x.index_select(0, self._duplicates) for x in after))
            first = last
        return self._concat_outputs(outs)

    @cached_property
    def _state_groups(self) -> list[tuple[Tensor, Tensor | None, PackedDocuments]]:
        """Slots, new-sequence mask (or None) and documents: first of the decode rows, then of the chunks."""
        groups = list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]]()
        if self.n_decode:
            assert self.decode.states is not None
            groups.append((self.decode.states, self.decode.lengths == 1, (1,) * self.n_decode))
        if self.chunks:
            slots, starts = np.array([[chunk.state, chunk.start] for chunk in self.chunks]).T
            groups.append((slots, starts == 0, tuple(chunk.length for chunk in self.chunks)))
        return [
            (
                self._on_device(np.ascontiguousarray(slots)),
                self._on_device(fresh) if fresh.any() else None,
                PackedDocuments(cu_seqlens_from_lengths(lengths, self.device), max(lengths), lengths),
            )
            for slots, fresh, lengths in groups
        ]

    def attend_latent(self, layer: LayerIndex, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Attend to latents for decoding sequences, and to expanded keys for prompts.

        The matmuls of expanded keys are narrower, which pays off for many queries.
        """
        q, rows = self._prepare(layer, q, keys.rows)
        outs, first = list[Tensor](), self.n_decode
        if first:
            lora_mapping = self._decode_lora_mapping
            latents = self._attend_pages(layer, keys.absorb(q[:first], lora_mapping), spec)
            outs.append(keys.expand_values(latents, lora_mapping))
        if self.chunks:
            k, v = keys.expand(rows[first:], self._chunk_lora_mapping)
            out = self._attend_chunks(layer, keys.pad(q[first:]), k, v, spec, keys)
            outs.append(out[..., : keys.value_features])
        return self._concat_outputs(outs)

    @cached_property
    def _decode_lora_mapping(self) -> LoRAMapping | None:
        return self.lora_mapping and self.lora_mapping.rows(0, self.n_decode)

    @cached_property
    def _chunk_lora_mapping(self) -> LoRAMapping | None:
        return self.lora_mapping and self.lora_mapping.rows(self.n_decode, len(self._positions))

    @cached_property
    def _cached_lora_mappings(self) -> list[LoRAMapping | None]:
        """LoRAs of the cached tokens of each chunk's sequence after this forward."""
        firsts = np.cumsum([self.n_decode, *(chunk.length for chunk in self.chunks)]).tolist()
        return [
            self.lora_mapping and self.lora_mapping.repeated(first, chunk.start + chunk.length)
            for chunk, first in zip(self.chunks, firsts, strict=False)
        ]

    @cached_property
    def _chunk_pages(self) -> list[Tensor]:
        """The pages, int64 [n], of each chunk's sequence that have tokens after this forward."""
        size = self.cache.page_size
        needed = (chunk.pages[: -(-(chunk.start + chunk.length) // size)] for chunk in self.chunks)
        return [self._on_device(np.asarray(pages, dtype=np.int64)) for pages in needed]

    def _on_device(self, x: np.ndarray) -> Tensor:
        return to_device_async(torch.from_numpy(x), self.device)

    def _prepare(self, layer: LayerIndex, q: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Store the new rows [T, heads, features] of this forward and of its duplicates.

        Returns q and the rows without padding.
        """
        unpadded = (q, *rows)
        if self._n_padding:
            unpadded = tuple(x[: -self._n_padding] for x in unpadded)
        stored = self.finite_rows(unpadded[1:])
        if self._duplicates is not None:
            stored = tuple(torch.cat([x, x.index_select(0, self._duplicates)]) for x in stored)
        self.cache.write(layer, self._rows, *stored)
        return unpadded

    def _concat_outputs(self, outs: list[Tensor]) -> Tensor:
        """Return the results of this forward's tokens, and zeros for its padding."""
        if self._n_padding:
            outs.append(outs[0].new_zeros(self._n_padding, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_pages(self, layer: LayerIndex, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Return attention [B, H, V] of one query [B, H, K] per sequence to its pages."""
        return attend_decode_rows(self.cache, layer, q, self.decode.pages, self.decode.lengths, spec, self._batches)

    def _attend_chunks(
        self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, latent: LatentKeys | None = None
    ) -> Tensor:
        """Return attention [S, H, V] of the chunks: packed if they start a sequence, else with the cache.

        `latent` expands cached rows to keys and values.
        """
        bounds = np.cumsum([0, *(chunk.length for chunk in self.chunks)]).tolist()
        if self._packed is not None and len(self._packed.documents.lengths) == len(self.chunks):
            return self._packed.attend(layer, q, k, v, spec)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        spans = list(zip(self.chunks, bounds, bounds[1:], strict=False))
        if self._packed is not None:
            rows = torch.cat([torch.arange(a, b, device=q.device) for chunk, a, b in spans if chunk.start == 0])
            out[rows] = self._packed.attend(layer, q[rows], k[rows], v[rows], spec)
        for index, (chunk, first, last) in enumerate(spans):
            if chunk.start:
                total = chunk.start + chunk.length
                cached = self.cache.read(layer, self._chunk_pages[index], total)
                keys, values = cached if latent is None else latent.expand(cached[0], self._cached_lora_mappings[index])
                document = q[None, first:last], keys[None], values[None]
                out[first:last] = batched_attention(*document, spec)[0]
        return out


def attend_decode_rows(
    cache: PagedCache,
    layer: LayerIndex,
    q: Tensor,
    pages: np.ndarray,
    lengths: np.ndarray,
    spec: AttentionSpec,
    batches: dict[int | None, list[PageBatch]],
) -> Tensor:
    """Return attention [B, H, V] of one query [B, H, K] per sequence to its pages, which the host knows.

    Args:
        cache: the pool.
        layer: index of the layer.
        q: queries.
        pages: int64 [B, width], the pages of each sequence, in order.
        lengths: int64 [B], tokens of each sequence, at least 1.
        spec: the layer's attention options.
        batches: page batches of this forward by window, filled here.
    """
    paged = cache.layers[layer]
    if decode_kernel.can_use(q, paged):
        return decode_kernel.attend(q, paged, pages, lengths, spec)
    if spec.window not in batches:
        wide = torch.promote_types(q.dtype, torch.float32)
        batches[spec.window] = page_batches(pages, lengths, cache, spec.window, wide)
    return attend_to_pages(q, paged, batches[spec.window], spec)
