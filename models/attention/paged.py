"""Attention over a paged key-value cache: decoding with the modules that train.

The cache is a pool of pages of `page_size` tokens; a sequence has a list of pages, and sequences may share pages (Kwon
et al. 2023, arXiv:2309.06180). A page number stands for a page in every layer; layers that cache the same rows are a
group, whose pages are in one tensor.

The tokens of a forward are one new token for each decoding sequence, then chunks of prompts. Keys and values are not
gathered into a padded batch: each page is one matrix of a batched product, in place, and the results of a sequence's
pages are combined by the rescaled sums of FlashDecoding (Dao et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.blockwise import batched_attention
from archon.models.attention.cache import CacheSpec, PagedRows
from archon.models.attention.documents import PackedDocuments
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import AttentionMeta, PackedAttention, Scan
from archon.models.attention.spec import AttentionSpec, softmax_with_sinks
from archon.models.attention.states import StateCache

# A contiguous range of pages is read in place if it is at most this many times as long as the pages needed.
_MAX_RANGE_WASTE = 2.0
# Maximum sequences that share one read of a page; more of them read it again.
_MAX_SLOTS = 8
# The initial maximum of scores: finite, so that exp(-inf - maximum) is 0 and not NaN.
_LOWEST_SCORE = -1e30


@dataclass(frozen=True)
class PagedTensors:
    """The pages of layers that cache the same rows, or of one of them without the first dimension.

    Attributes:
        rows: what each layer caches.
        keys: [n_layers, n_pages, heads, page_size, key_features].
        values: [n_layers, n_pages, heads, page_size, value_features], a view of `keys` if `rows.values_in_keys`.
    """

    rows: PagedRows
    keys: Tensor
    values: Tensor

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors with memory of their own."""
        return (self.keys,) if self.rows.values_in_keys else (self.keys, self.values)

    def layer(self, index: int) -> PagedTensors:
        """Returns the pages of one of the layers, as views."""
        return PagedTensors(self.rows, self.keys[index], self.values[index])


class PagedCache:
    """`n_pages` pages in every layer that caches rows.

    Args:
        specs: what each layer caches, by its index.
        n_states: slots for the states of layers that cache these.

    Attributes:
        groups: the tensors of the layers of each spec.
        states: the states of layers without pages.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        n_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        n_states: int = 0,
    ) -> None:
        self.states = StateCache(specs, n_states, dtype, device)
        self.n_pages, self.page_size, self.device = n_pages, page_size, torch.device(device)
        self._dtype = dtype
        self._members: dict[PagedRows, list[int]] = {}
        for layer, spec in enumerate(specs):
            if isinstance(spec, PagedRows):
                self._members.setdefault(spec, []).append(layer)
        self.clear()

    def clear(self) -> None:
        """Fill with zeros: masked positions must be finite, since 0 · NaN is NaN."""
        self.states.clear()
        self.groups = tuple(self._zeros(rows, len(members)) for rows, members in self._members.items())
        self.layers = {
            layer: group.layer(index) for group in self.groups for index, layer in enumerate(self._members[group.rows])
        }

    def _zeros(self, rows: PagedRows, n_layers: int) -> PagedTensors:
        shape = n_layers, self.n_pages, rows.heads, self.page_size
        keys = _lazy_zeros((*shape, rows.key_features), self._dtype, self.device)
        if rows.values_in_keys:
            return PagedTensors(rows, keys, keys[..., : rows.value_features])
        return PagedTensors(rows, keys, _lazy_zeros((*shape, rows.value_features), self._dtype, self.device))

    def token_rows(self, pages: np.ndarray, offsets: np.ndarray) -> dict[int, Tensor]:
        """Returns the rows [T · heads] of tokens in a layer's cache as a matrix [n_pages · heads · page_size,
        features], for each number of heads that layers have."""
        rows = {}
        for n_heads in {rows.heads for rows in self._members}:
            numbers = (pages[:, None] * n_heads + np.arange(n_heads)) * self.page_size + offsets[:, None]
            rows[n_heads] = torch.from_numpy(numbers.reshape(-1)).to(self.device)
        return rows

    def write(self, layer: int, rows: dict[int, Tensor], *new: Tensor) -> None:
        """Store keys [T, heads, key_features], and values unless they are in the keys, at `token_rows`."""
        paged = self.layers[layer]
        for cache, x in zip(paged.stored, new, strict=True):
            cache.view(-1, x.shape[-1]).index_copy_(0, rows[paged.rows.heads], x.reshape(-1, x.shape[-1]))

    def read(self, layer: int, pages: Tensor, length: int) -> list[Tensor]:
        """Returns the first `length` keys [length, heads, key_features] of the sequence in `pages`, and its values
        unless they are in the keys."""
        stored = self.layers[layer].stored
        return [cache.index_select(0, pages).transpose(1, 2).flatten(0, 1)[:length] for cache in stored]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages in every layer."""
        source, target = (torch.tensor(pages, device=self.device) for pages in (sources, targets))
        for group in self.groups:
            for cache in group.stored:
                cache.index_copy_(1, target, cache.index_select(1, source))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on a CPU they use memory only once written, so a large cache costs nothing until used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.zeros(size + alignment, dtype=np.uint8)  # torch.zeros would write all of them
    offset = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)


@dataclass
class DecodeRows:
    """The sequences that add one token in this forward, as host arrays.

    Of sequences with equal tokens only one is computed; the others, its duplicates, get its keys and values.
    """

    pages: np.ndarray  # int64 [B, max_pages], the pages of each sequence, in order
    lengths: np.ndarray  # int64 [B], tokens of each sequence, including the new one
    duplicate_pages: np.ndarray | None = None  # int64 [C, max_pages], the pages of each duplicate
    duplicate_rows: np.ndarray | None = None  # int64 [C], the row that each duplicate copies
    states: np.ndarray | None = None  # int64 [B], the slot of each sequence's state
    duplicate_states: np.ndarray | None = None  # int64 [C], that of each duplicate's


@dataclass
class PrefillChunk:
    """Consecutive prompt tokens of one sequence."""

    start: int  # tokens of the sequence that are cached already
    length: int  # tokens of this chunk
    pages: Sequence[int]  # the sequence's pages, enough for start + length tokens
    document_length: int  # length of the full prompt, which dynamic and LongRoPE frequencies depend on
    state: int = -1  # slot of the sequence's state


@dataclass
class _PageBatch:
    """P pages, each with R slots for sequences that have the page."""

    pages: Tensor | slice  # int64 [P] or a range of the pool
    slot_rows: Tensor  # int64 [P · R], the decode row of each slot
    bias: Tensor  # [P, 1, R, 1, page_size], 0 where the slot's row sees the position and -inf elsewhere
    page_of_row: Tensor | None  # int64 [B], each row's index among the P, if R is 1 and each row has one page here

    def read(self, cache: Tensor) -> Tensor:
        """Returns the pages of one layer's cache in the dtype of the scores, as a view if they are a range."""
        pages = cache[self.pages] if isinstance(self.pages, slice) else cache.index_select(0, self.pages)
        return pages.to(self.bias.dtype)

    def gather_rows(self, rows: Tensor, n_kv_heads: int) -> Tensor:
        """Returns rows [B, H, ...] of each slot: [P, n_kv_heads, R, H / n_kv_heads, ...]."""
        n_pages, _, slots = self.bias.shape[:3]
        picked = rows.index_select(0, self.slot_rows)
        return picked.view(n_pages, slots, n_kv_heads, -1, *rows.shape[2:]).transpose(1, 2)

    def flatten_slots(self, values: Tensor) -> Tensor:
        """Returns values [P, n_kv_heads, R, H / n_kv_heads, ...] as one row per slot: [P · R, H · ...]."""
        return values.transpose(1, 2).reshape(len(self.slot_rows), -1)


class PagedAttention(AttentionMeta):
    """One forward of the generator: the `decode` rows first, then the tokens of `chunks`, in order.

    Args:
        cache: the pool; new keys and values are written to it before attention.
        decode: sequences that add one token each.
        chunks: parts of prompts; those that start at 0 attend as packed documents.
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
            self._duplicates = torch.from_numpy(decode.duplicate_rows).to(self.device)
        self._rows = self._cache_rows()
        self._batches: dict[int | None, list[_PageBatch]] = {}
        self._packed: PackedAttention | None = None
        if new_prompts := tuple(chunk.length for chunk in self.chunks if chunk.start == 0):
            self._packed = PackedAttention.from_lengths(new_prompts, self.device, attn_type)

    @property
    def positions(self) -> Tensor:
        """int64 [T], position of every token of this forward in its sequence; 0 for padding."""
        return torch.from_numpy(np.pad(self._positions, (0, self._n_padding))).to(self.device)

    def prepare(self, hidden: Tensor) -> None:
        if self._packed is not None:
            self._packed.prepare(hidden)

    def document_lengths(self, positions: Tensor) -> Tensor:
        lengths = [self.decode.lengths, *(np.full(chunk.length, chunk.document_length) for chunk in self.chunks)]
        lengths.append(np.ones(self._n_padding, dtype=np.int64))
        return torch.from_numpy(np.concatenate(lengths)).to(positions.device)

    def _cache_rows(self) -> dict[int, Tensor]:
        """Returns `PagedCache.token_rows` of every token of this forward, then of the duplicates."""
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = self._prepare(layer, q, k, v)
        outs, first = list[Tensor](), self.n_decode
        if first:
            outs.append(self._attend_pages(layer, q[:first], spec))
        if self.chunks:
            outs.append(self._attend_chunks(layer, q[first:], k[first:], v[first:], spec, lambda k, v: (k, v)))
        return self._joined(outs)

    def recur(self, layer: int, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan) -> Tensor:
        outs, first = list[Tensor](), self.n_decode
        if first:
            slots, fresh, documents = self._decode_states
            before = self.cache.states.read(layer, slots, fresh)
            out, after = scan([x[:first] for x in rows], weights, documents, before)
            outs.append(out)
            self.cache.states.write(layer, slots, after)
            if self._duplicates is not None:
                assert self.decode.duplicate_states is not None
                copies = torch.from_numpy(self.decode.duplicate_states).to(self.device)
                self.cache.states.write(layer, copies, tuple(x.index_select(0, self._duplicates) for x in after))
        if self.chunks:
            slots, fresh, documents = self._chunk_states
            before = self.cache.states.read(layer, slots, fresh)
            out, after = scan([x[first : len(self._positions)] for x in rows], weights, documents, before)
            outs.append(out)
            self.cache.states.write(layer, slots, after)
        return self._joined(outs)

    @cached_property
    def _decode_states(self) -> tuple[Tensor, Tensor | None, PackedDocuments]:
        assert self.decode.states is not None
        return self._states(self.decode.states, self.decode.lengths == 1, (1,) * self.n_decode)

    @cached_property
    def _chunk_states(self) -> tuple[Tensor, Tensor | None, PackedDocuments]:
        slots, starts = np.array([[chunk.state, chunk.start] for chunk in self.chunks]).T
        return self._states(slots, starts == 0, tuple(chunk.length for chunk in self.chunks))

    def _states(
        self, slots: np.ndarray, fresh: np.ndarray, lengths: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None, PackedDocuments]:
        """Returns the slots, which sequences begin (None if none), and the tokens of this forward as documents."""
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
        mask = torch.from_numpy(fresh).to(self.device) if fresh.any() else None
        slots_B = torch.from_numpy(np.ascontiguousarray(slots)).to(self.device)
        return slots_B, mask, PackedDocuments(bounds, max(lengths), lengths)

    def attend_latent(self, layer: int, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Decoding sequences attend to the latents themselves, and prompts to expanded keys, whose product is
        narrower."""
        q, rows = self._prepare(layer, q, keys.rows)
        outs, first = list[Tensor](), self.n_decode
        if first:
            outs.append(keys.expand_values(self._attend_pages(layer, keys.absorb(q[:first]), spec)))
        if self.chunks:
            k, v = keys.expand(rows[first:])
            out = self._attend_chunks(layer, keys.pad(q[first:]), k, v, spec, keys.expand)
            outs.append(out[..., : keys.value_features])
        return self._joined(outs)

    def _prepare(self, layer: int, q: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Store the new rows [T, heads, features] of this forward and of its duplicates.

        Returns q and the rows without padding.
        """
        unpadded = (q, *rows)
        if self._n_padding:
            unpadded = tuple(x[: -self._n_padding] for x in unpadded)
        stored = unpadded[1:]
        if self._duplicates is not None:
            stored = tuple(torch.cat([x, x.index_select(0, self._duplicates)]) for x in stored)
        self.cache.write(layer, self._rows, *stored)
        return unpadded

    def _joined(self, outs: list[Tensor]) -> Tensor:
        """Returns the results of this forward's tokens, and zeros for its padding."""
        if self._n_padding:
            outs.append(outs[0].new_zeros(self._n_padding, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_pages(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Returns attention [B, H, V] of one query [B, H, K] per sequence to the sequence's pages."""
        wide = torch.promote_types(q.dtype, torch.float32)
        if spec.window not in self._batches:
            self._batches[spec.window] = _page_batches(self.decode, self.cache, spec.window, wide)
        batches = self._batches[spec.window]
        n_rows, n_heads = q.shape[:2]
        paged = self.cache.layers[layer]
        keys, values, n_kv_heads = paged.keys, paged.values, paged.rows.heads
        dtype, q = q.dtype, q.to(wide) * spec.scale
        if len(batches) == 1 and batches[0].page_of_row is not None:
            return _attend_single_pages(q, keys, values, batches[0], spec).to(dtype)

        # Scores [P, n_kv_heads, R, H / n_kv_heads, page_size] of each batch, and the maximum of each row and head.
        maximum = torch.full((n_rows, n_heads), _LOWEST_SCORE, dtype=wide, device=q.device)
        if spec.sinks is not None:
            maximum = torch.maximum(maximum, spec.sinks)
        all_scores = []
        for batch in batches:
            queries = batch.gather_rows(q, n_kv_heads)
            scores = torch.matmul(queries.flatten(2, 3), batch.read(keys).transpose(-1, -2))
            scores = spec.capped(scores).view(*queries.shape[:-1], -1).add_(batch.bias)
            page_maximum = batch.flatten_slots(scores.amax(dim=-1))
            maximum.scatter_reduce_(0, batch.slot_rows[:, None].expand(-1, n_heads), page_maximum, "amax")
            all_scores.append(scores)
        total = torch.zeros_like(maximum) if spec.sinks is None else torch.exp(spec.sinks - maximum)
        out = maximum.new_zeros(n_rows, n_heads * values.shape[-1])
        for batch, scores in zip(batches, all_scores, strict=True):
            scores.sub_(batch.gather_rows(maximum, n_kv_heads).unsqueeze(-1)).exp_()
            total.index_add_(0, batch.slot_rows, batch.flatten_slots(scores.sum(dim=-1)))
            partial = torch.matmul(scores.flatten(2, 3), batch.read(values))
            out.index_add_(0, batch.slot_rows, batch.flatten_slots(partial.view(*scores.shape[:-1], -1)))
        return (out.view(n_rows, n_heads, -1) / total[:, :, None]).to(dtype)

    def _attend_chunks(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        expand: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Returns attention [S, H, V] of the chunks: packed documents if they start a sequence, else with the cache,
        whose rows `expand` turns into keys and values."""
        bounds = np.cumsum([0, *(chunk.length for chunk in self.chunks)]).tolist()
        if self._packed is not None and len(self._packed.documents.lengths) == len(self.chunks):
            return self._packed.attend(layer, q, k, v, spec)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        spans = list(zip(self.chunks, bounds, bounds[1:], strict=False))
        if self._packed is not None:
            rows = torch.cat([torch.arange(a, b, device=q.device) for chunk, a, b in spans if chunk.start == 0])
            out[rows] = self._packed.attend(layer, q[rows], k[rows], v[rows], spec)
        for chunk, first, last in spans:
            if chunk.start:
                total = chunk.start + chunk.length
                pages = torch.tensor(chunk.pages[: -(-total // self.cache.page_size)], device=q.device)
                keys, values = expand(*self.cache.read(layer, pages, total))
                document = q[None, first:last], keys[None], values[None]
                out[first:last] = batched_attention(*document, spec)[0]
        return out


def _attend_single_pages(q: Tensor, keys: Tensor, values: Tensor, batch: _PageBatch, spec: AttentionSpec) -> Tensor:
    """Returns attention [B, H, V] of short sequences: none has a second page, so an ordinary softmax is enough."""
    assert batch.page_of_row is not None
    queries = batch.gather_rows(q, keys.shape[1]).flatten(2, 3)
    scores = spec.capped(torch.matmul(queries, batch.read(keys).transpose(-1, -2))).add(batch.bias[:, :, 0])
    sinks = None if spec.sinks is None else spec.sinks.view(keys.shape[1], -1)
    out = torch.matmul(softmax_with_sinks(scores, sinks), batch.read(values))
    return out.view(-1, q.shape[1], values.shape[-1]).index_select(0, batch.page_of_row)


def _page_batches(decode: DecodeRows, cache: PagedCache, window: int | None, dtype: torch.dtype) -> list[_PageBatch]:
    """Returns the pages that the decode rows see through `window`: those of one row, and those that rows share.

    A shared page is read once for up to `_MAX_SLOTS` rows, which saves memory traffic for the samples of a prompt.
    """
    size = cache.page_size
    first_token = np.zeros_like(decode.lengths) if window is None else np.maximum(decode.lengths - window, 0)
    index = np.arange(decode.pages.shape[1])
    seen = (index >= (first_token // size)[:, None]) & (index <= ((decode.lengths - 1) // size)[:, None])
    row, ordinal = np.nonzero(seen)
    page = decode.pages[row, ordinal]
    order = np.argsort(page, kind="stable")
    page, row, position = page[order], row[order], ordinal[order] * size

    first_entry, counts = np.unique(page, return_index=True, return_counts=True)[1:]
    rank = np.arange(len(page)) - np.repeat(first_entry, counts)  # of a row among those with the same page
    shared = np.repeat(counts > 1, counts)
    bounds = first_token, decode.lengths
    batches = []
    for some, slots in ((~shared, 1), (shared, min(int(counts.max()), _MAX_SLOTS))):
        if some.any():
            entries = page[some], row[some], position[some], rank[some]
            batches.append(_page_batch(entries, slots, bounds, cache, dtype))
    return batches


def _page_batch(
    entries: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    slots: int,
    bounds: tuple[np.ndarray, np.ndarray],
    cache: PagedCache,
    dtype: torch.dtype,
) -> _PageBatch:
    """Returns a batch of pages with `slots` rows per page.

    Args:
        entries: arrays of page, decode row, position of the page's first token, and number of the entry among those
            with the same page; sorted by page.
        bounds: first position that each decode row sees, and the one after its last.
    """
    page, row, position, rank = entries
    # A page with more rows than slots occurs several times.
    is_new = np.concatenate([[True], (page[1:] != page[:-1]) | (rank[1:] % slots == 0)])
    index, pages = np.cumsum(is_new) - 1, page[is_new]
    selection: Tensor | slice = torch.from_numpy(pages).to(cache.device)
    low, high = int(pages[0]), int(pages[-1]) + 1
    if slots == 1 and high - low <= _MAX_RANGE_WASTE * len(pages):
        selection, index = slice(low, high), page - low
    n_pages = high - low if isinstance(selection, slice) else len(pages)
    # An unused slot has row 0, and positions that are not visible.
    slot_rows = np.zeros((n_pages, slots), dtype=np.int64)
    first = np.full((n_pages, slots), -cache.page_size)
    slot_rows[index, rank % slots], first[index, rank % slots] = row, position
    positions = first[:, :, None] + np.arange(cache.page_size)
    visible = (positions >= bounds[0][slot_rows, None]) & (positions < bounds[1][slot_rows, None])
    bias = torch.zeros(visible.shape, dtype=dtype, device=cache.device)
    bias.masked_fill_(torch.from_numpy(~visible).to(bias.device), -torch.inf)
    page_of_row = None
    if slots == 1 and (np.bincount(row, minlength=len(bounds[0])) == 1).all():
        page_of_row = torch.from_numpy(index[np.argsort(row)]).to(bias.device)
    slot_rows_P = torch.from_numpy(slot_rows.reshape(-1)).to(bias.device)
    return _PageBatch(selection, slot_rows_P, bias[:, None, :, None, :], page_of_row)
