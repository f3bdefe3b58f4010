"""Attention over a paged key-value cache: decoding with the same modules that train.

A cache is a pool of pages of `page_size` tokens; a sequence owns a list of them, and several sequences may own the
same page (Kwon et al. 2023, arXiv:2309.06180). One forward mixes two kinds of tokens: first one new token for each
decoding sequence, then the chunks of prompts being read. Keys and values are never gathered into a padded batch: each
page is multiplied where it lies, as one matrix of a batched product, and the pages of a sequence are joined by the
rescaled sums of FlashDecoding (Dao et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.attention.spec import AttentionSpec

# Queries of a chunk that continues a cached prefix attend in blocks of this many rows, each with its own small mask.
_QUERY_BLOCK = 128
# A contiguous range of pages is read in place, unless more than half of it would be computed for nothing.
_MAX_RANGE_WASTE = 2.0
# Most sequences that one reading of a shared page serves; more of them read it again.
_MAX_PLACES = 8
# Stands for the maximum of no scores at all, so that exp(-inf - maximum) is 0 and not NaN.
_LOWEST = -1e30


class PagedCache:
    """Keys and values of `n_pages` pages in every layer, each [n_layers, n_pages, n_kv_heads, page_size, head_dim]."""

    def __init__(
        self,
        n_layers: int,
        n_pages: int,
        n_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._shape = (n_layers, n_pages, n_kv_heads, page_size, head_dim)
        self._dtype, self._device = dtype, torch.device(device)
        self.n_pages, self.n_kv_heads, self.page_size = n_pages, n_kv_heads, page_size
        self.clear()

    def clear(self) -> None:
        """Zeros everywhere, not just anything: what a masked position holds must be finite, since 0 · NaN is NaN."""
        self.keys, self.values = (_lazy_zeros(self._shape, self._dtype, self._device) for _ in range(2))

    def token_rows(self, pages: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Rows [T · n_kv_heads] of the cache seen as a matrix [n_pages · n_kv_heads · page_size, head_dim]."""
        heads = np.arange(self.n_kv_heads)
        rows = (pages[:, None] * self.n_kv_heads + heads) * self.page_size + offsets[:, None]
        return torch.from_numpy(rows.reshape(-1)).to(self.keys.device)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, n_kv_heads, head_dim] at `token_rows`."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[layer].view(-1, new.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, n_kv_heads, head_dim] of a sequence that owns `pages`."""
        keys, values = (
            cache[layer].index_select(0, pages).transpose(1, 2).flatten(0, 1)[:length]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in every layer."""
        source, target = (torch.tensor(pages, device=self.keys.device) for pages in (sources, targets))
        for cache in (self.keys, self.values):
            cache.index_copy_(1, target, cache.index_select(1, source))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros which on a CPU take memory only where they are written, so that a cache may be generous."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.zeros(size + alignment, dtype=np.uint8)  # torch.zeros would write all of them
    offset = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)


@dataclass
class DecodeRows:
    """The sequences that add one token in this forward, as host arrays.

    Of sequences whose tokens are all the same one is computed; the others, its duplicates, get its keys and values.
    """

    pages: np.ndarray  # int64 [B, max_pages], the pages of each sequence, in order
    lengths: np.ndarray  # int64 [B], tokens of each sequence, the new one included
    duplicate_pages: np.ndarray | None = None  # int64 [C, max_pages], the pages of each duplicate
    duplicate_rows: np.ndarray | None = None  # int64 [C], the row of the sequence that each duplicates


@dataclass
class PrefillChunk:
    """Consecutive tokens of one sequence that are read in this forward."""

    start: int  # how many tokens of the sequence are already cached
    length: int  # how many are read now
    pages: Sequence[int]  # the sequence's pages, enough for start + length tokens
    document_length: int  # the prompt's whole length, which dynamic and LongRoPE frequencies follow


@dataclass
class _PageBatch:
    """P pages, each to be multiplied with the queries of up to R sequences that own it."""

    pages: Tensor | slice  # int64 [P] or a range of the pool
    owner: Tensor  # int64 [P · R], the decode row each of a page's places is for
    bias: Tensor  # [P, 1, R, 1, page_size], 0 where that row sees the position and -inf elsewhere
    line_of_row: Tensor | None  # int64 [B], the page of each row when R is 1 and each row has just one in this batch

    def read(self, cache: Tensor) -> Tensor:
        """The batch's pages of one layer's cache in the dtype of the scores: in place if they are a range of it."""
        pages = cache[self.pages] if isinstance(self.pages, slice) else cache.index_select(0, self.pages)
        return pages.to(self.bias.dtype)

    def by_page(self, rows: Tensor, n_kv_heads: int) -> Tensor:
        """[B, H, ...] to [P, n_kv_heads, R, H / n_kv_heads, ...]: what each place of a page needs of its row."""
        n_pages, _, places = self.bias.shape[:3]
        picked = rows.index_select(0, self.owner)
        return picked.view(n_pages, places, n_kv_heads, -1, *rows.shape[2:]).transpose(1, 2)

    def by_owner(self, values: Tensor) -> Tensor:
        """[P, n_kv_heads, R, H / n_kv_heads, ...] to [P · R, ...], one row a place, heads and the rest flattened."""
        return values.transpose(1, 2).reshape(len(self.owner), -1)


class PagedAttention(AttentionMeta):
    """One forward of the generator: `decode` rows come first, then the tokens of `chunks`, in order.

    Args:
        cache: the pool; new keys and values are written to it before anything attends.
        decode: sequences that add one token each.
        chunks: parts of prompts; those that start at 0 attend like packed training documents.
        attn_type: backend of those, as for `PackedAttention`; pages are read in the same way whatever it is.
        padded_length: rows of the forward, by default its tokens; those after them are padding, whose output is 0.
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
        self.device = cache.keys.device
        self._positions = np.concatenate(
            [decode.lengths - 1, *(np.arange(c.start, c.start + c.length) for c in self.chunks)]
        )
        self._n_padding = 0 if padded_length is None else padded_length - len(self._positions)
        assert self._n_padding >= 0, f"{len(self._positions)} tokens do not fit in {padded_length} rows"
        self._duplicates: Tensor | None = None
        if decode.duplicate_rows is not None and decode.duplicate_rows.size:
            self._duplicates = torch.from_numpy(decode.duplicate_rows).to(self.device)
        self._rows = self._write_rows()
        self._batches: dict[int | None, list[_PageBatch]] = {}
        fresh = [chunk.length for chunk in self.chunks if chunk.start == 0]
        self._packed: PackedAttention | None = None
        if fresh:
            self._packed = PackedAttention.of_lengths(tuple(fresh), self.device, attn_type)

    @property
    def positions(self) -> Tensor:
        """int64 [T]: position of every token of this forward within its sequence, 0 for padding."""
        return torch.from_numpy(np.pad(self._positions, (0, self._n_padding))).to(self.device)

    def begin(self, hidden: Tensor) -> None:
        if self._packed is not None:
            self._packed.begin(hidden)

    def document_lengths(self, positions: Tensor) -> Tensor:
        lengths = [self.decode.lengths, *(np.full(chunk.length, chunk.document_length) for chunk in self.chunks)]
        lengths.append(np.ones(self._n_padding, dtype=np.int64))
        return torch.from_numpy(np.concatenate(lengths)).to(positions.device)

    def _write_rows(self) -> Tensor:
        size, decode = self.cache.page_size, self.decode
        last = decode.lengths - 1
        pages, positions = [decode.pages[np.arange(self.n_decode), last // size]], self._positions
        for chunk in self.chunks:
            span = np.arange(chunk.start, chunk.start + chunk.length)
            pages.append(np.asarray(chunk.pages, dtype=np.int64)[span // size])
        if self._duplicates is not None:
            assert decode.duplicate_pages is not None
            theirs = last[decode.duplicate_rows]
            pages.append(decode.duplicate_pages[np.arange(len(theirs)), theirs // size])
            positions = np.concatenate([positions, theirs])
        return self.cache.token_rows(np.concatenate(pages), positions % size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        spec.require({"window"}, "decoding from a paged cache")
        if self._n_padding:
            q, k, v = (x[: -self._n_padding] for x in (q, k, v))
        if self._duplicates is None:
            self.cache.write(layer, self._rows, k, v)
        else:
            self.cache.write(layer, self._rows, *(torch.cat([x, x.index_select(0, self._duplicates)]) for x in (k, v)))
        outs = []
        if self.n_decode:
            outs.append(self._attend_pages(layer, q[: self.n_decode], spec))
        if self.chunks:
            first = self.n_decode
            outs.append(self._attend_chunks(layer, q[first:], k[first:], v[first:], spec))
        if self._n_padding:
            outs.append(q.new_zeros(self._n_padding, *q.shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_pages(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """One query [B, H, D] a sequence against its pages; returns [B, H, D]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        if spec.window not in self._batches:
            self._batches[spec.window] = _page_batches(self.decode, self.cache, spec.window, wide)
        batches = self._batches[spec.window]
        n_rows, n_heads, head_dim = q.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        n_kv_heads = keys.shape[1]
        dtype, q = q.dtype, q.to(wide) * spec.scale
        if len(batches) == 1 and batches[0].line_of_row is not None:
            return _attend_one_page_each(q, keys, values, batches[0]).to(dtype)

        # Scores [P, n_kv_heads, R, H / n_kv_heads, page_size] of each batch, and the highest of each row and head.
        top = torch.full((n_rows, n_heads), _LOWEST, dtype=wide, device=q.device)
        scored = []
        for batch in batches:
            queries = batch.by_page(q, n_kv_heads)
            scores = torch.matmul(queries.flatten(2, 3), batch.read(keys).transpose(-1, -2))
            scores = scores.view(*queries.shape[:-1], -1).add_(batch.bias)
            best = batch.by_owner(scores.amax(dim=-1))
            top.scatter_reduce_(0, batch.owner[:, None].expand(-1, n_heads), best, "amax")
            scored.append(scores)
        mass = top.new_zeros(n_rows, n_heads)
        out = top.new_zeros(n_rows, n_heads * head_dim)
        for batch, scores in zip(batches, scored, strict=True):
            scores.sub_(batch.by_page(top, n_kv_heads).unsqueeze(-1)).exp_()
            mass.index_add_(0, batch.owner, batch.by_owner(scores.sum(dim=-1)))
            partial = torch.matmul(scores.flatten(2, 3), batch.read(values))
            out.index_add_(0, batch.owner, batch.by_owner(partial.view(*scores.shape[:-1], -1)))
        return (out.view(n_rows, n_heads, head_dim) / mass[:, :, None]).to(dtype)

    def _attend_chunks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Chunks that start a sequence attend as packed documents; the others also to what is cached before them."""
        bounds = np.cumsum([0, *(chunk.length for chunk in self.chunks)]).tolist()
        if self._packed is not None and len(self._packed.lengths) == len(self.chunks):
            return self._packed.attend(layer, q, k, v, spec)
        out = torch.empty_like(q)
        spans = list(zip(self.chunks, bounds, bounds[1:], strict=False))
        if self._packed is not None:
            fresh = torch.cat([torch.arange(a, b, device=q.device) for chunk, a, b in spans if chunk.start == 0])
            out[fresh] = self._packed.attend(layer, q[fresh], k[fresh], v[fresh], spec)
        for chunk, first, last in spans:
            if chunk.start:
                total = chunk.start + chunk.length
                pages = torch.tensor(chunk.pages[: -(-total // self.cache.page_size)], device=q.device)
                keys, values = self.cache.read(layer, pages, total)
                out[first:last] = continue_attention(q[first:last], keys, values, window=spec.window, scale=spec.scale)
        return out


def _attend_one_page_each(q: Tensor, keys: Tensor, values: Tensor, batch: _PageBatch) -> Tensor:
    """The case of short answers: no row has a second page, so an ordinary softmax does."""
    assert batch.line_of_row is not None
    queries = batch.by_page(q, keys.shape[1]).flatten(2, 3)
    scores = torch.matmul(queries, batch.read(keys).transpose(-1, -2)).add(batch.bias[:, :, 0])
    out = torch.matmul(torch.softmax(scores, dim=-1), batch.read(values))
    return out.view(-1, *q.shape[1:]).index_select(0, batch.line_of_row)


def continue_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
    """Causal attention of the last S tokens of a document: q [S, H, D], k and v [N, G, D] with N ≥ S to [S, H, D].

    Runs in blocks of queries, so that no mask is larger than [block, N].
    """
    length, total = len(q), len(k)
    outs = []
    for first in range(0, length, _QUERY_BLOCK):
        block = q[first : first + _QUERY_BLOCK]
        position = total - length + first
        stop = position + len(block)
        start = 0 if window is None else max(0, position - window + 1)
        rows = torch.arange(position, stop, device=q.device)[:, None]
        columns = torch.arange(start, stop, device=q.device)
        visible = columns <= rows
        if window is not None:
            visible &= columns > rows - window
        q_BHSD, k_BGND, v_BGND = (x.transpose(0, 1)[None] for x in (block, k[start:stop], v[start:stop]))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q_BHSD, k_BGND, v_BGND, attn_mask=visible, scale=scale, enable_gqa=gqa)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _page_batches(decode: DecodeRows, cache: PagedCache, window: int | None, dtype: torch.dtype) -> list[_PageBatch]:
    """The pages that this forward's decode rows see through `window`: those of one row, and those that rows share.

    A shared page is read once for up to `_MAX_PLACES` rows, so that the samples of a prompt do not multiply the memory
    traffic of reading it.
    """
    size = cache.page_size
    first_token = np.zeros_like(decode.lengths) if window is None else np.maximum(decode.lengths - window, 0)
    index = np.arange(decode.pages.shape[1])
    seen = (index >= (first_token // size)[:, None]) & (index <= ((decode.lengths - 1) // size)[:, None])
    row, ordinal = np.nonzero(seen)
    page = decode.pages[row, ordinal]
    order = np.argsort(page, kind="stable")
    page, row, position = page[order], row[order], ordinal[order] * size

    # rank: of a row among those that own the same page.
    first_entry, owners = np.unique(page, return_index=True, return_counts=True)[1:]
    rank = np.arange(len(page)) - np.repeat(first_entry, owners)
    alone = np.repeat(owners == 1, owners)
    bounds = first_token, decode.lengths
    batches = []
    if alone.any():
        batches.append(_page_batch(page[alone], row[alone], position[alone], rank[alone], 1, bounds, cache, dtype))
    if not alone.all():
        places, many = min(int(owners.max()), _MAX_PLACES), ~alone
        batches.append(_page_batch(page[many], row[many], position[many], rank[many], places, bounds, cache, dtype))
    return batches


def _page_batch(
    page: np.ndarray,
    row: np.ndarray,
    position: np.ndarray,
    rank: np.ndarray,
    places: int,
    bounds: tuple[np.ndarray, np.ndarray],
    cache: PagedCache,
    dtype: torch.dtype,
) -> _PageBatch:
    """Lay out entries (page, decode row, position of the page's first token), sorted by page, `places` rows a page.

    `bounds` are the first position each decode row sees and the one after its last.
    """
    # A page with more owners than places takes several lines.
    new_line = np.concatenate([[True], (page[1:] != page[:-1]) | (rank[1:] % places == 0)])
    line, pages = np.cumsum(new_line) - 1, page[new_line]
    where: Tensor | slice = torch.from_numpy(pages).to(cache.keys.device)
    low, high = int(pages[0]), int(pages[-1]) + 1
    if places == 1 and high - low <= _MAX_RANGE_WASTE * len(pages):
        where, line = slice(low, high), page - low
    n_lines = high - low if isinstance(where, slice) else len(pages)
    # A place that nobody needs is given to row 0, with positions that nobody sees.
    owner = np.zeros((n_lines, places), dtype=np.int64)
    first = np.full((n_lines, places), -cache.page_size)
    owner[line, rank % places], first[line, rank % places] = row, position
    held = first[:, :, None] + np.arange(cache.page_size)
    visible = (held >= bounds[0][owner, None]) & (held < bounds[1][owner, None])
    bias = torch.zeros(visible.shape, dtype=dtype, device=cache.keys.device)
    bias.masked_fill_(torch.from_numpy(~visible).to(bias.device), -torch.inf)
    line_of_row = None
    if places == 1 and (np.bincount(row, minlength=len(bounds[0])) == 1).all():
        line_of_row = torch.from_numpy(line[np.argsort(row)]).to(bias.device)
    owner_P = torch.from_numpy(owner.reshape(-1)).to(bias.device)
    return _PageBatch(where, owner_P, bias[:, None, :, None, :], line_of_row)
