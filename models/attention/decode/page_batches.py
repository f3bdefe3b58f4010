"""Attention of one query per sequence to the pages of a cache.

Keys and values are not gathered into a padded batch: each page is one matrix of a batched matmul, in place, and the
rescaled sums of FlashDecoding (Dao et al. 2023) combine the results of a sequence's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.decode.paged_cache import PagedCache, PagedTensors
from archon.models.attention.spec import AttentionSpec, softmax_with_sinks
from archon.parallel.transfer import to_device_async

# Maximum length of a contiguous range of pages that is read in place, relative to the needed pages.
_MAX_RANGE_WASTE = 2.0
# Maximum sequences that share one read of a page; more of them read it again.
_MAX_SLOTS = 8
# The initial maximum of scores: finite, so that exp(-inf - maximum) is 0 and not NaN.
_LOWEST_SCORE = -1e30


@dataclass
class PageBatch:
    """P pages, each with R slots for the sequences that share the page."""

    pages: Tensor | slice  # int64 [P] or a range of the pool
    slot_rows: Tensor  # int64 [P · R], the decode row of each slot
    bias: Tensor  # [P, 1, R, 1, page_size], 0 for visible positions, else -inf
    page_of_row: Tensor | None  # int64 [B], each row's index among the P, if R is 1 and each row has one page here

    def read(self, cache: Tensor) -> Tensor:
        """Return the pages of one layer's cache in the dtype of the scores; a view if they are a range."""
        pages = cache[self.pages] if isinstance(self.pages, slice) else cache.index_select(0, self.pages)
        return pages.to(self.bias.dtype)

    def gather_rows(self, rows: Tensor, n_kv_heads: int) -> Tensor:
        """Return rows [B, H, ...] of each slot: [P, n_kv_heads, R, H / n_kv_heads, ...]."""
        n_pages, _, slots = self.bias.shape[:3]
        picked = rows.index_select(0, self.slot_rows)
        return picked.view(n_pages, slots, n_kv_heads, -1, *rows.shape[2:]).transpose(1, 2)

    def flatten_slots(self, values: Tensor) -> Tensor:
        """Return values [P, n_kv_heads, R, H / n_kv_heads, ...] as one row per slot: [P · R, H · ...]."""
        return values.transpose(1, 2).reshape(len(self.slot_rows), -1)


def attend_to_pages(q: Tensor, paged: PagedTensors, batches: Sequence[PageBatch], spec: AttentionSpec) -> Tensor:
    """Return attention [B, H, V] of one query [B, H, K] per sequence to its pages in one layer.

    `batches` are the pages within the window of `spec`, from `page_batches`.
    """
    n_rows, n_heads = q.shape[:2]
    wide = batches[0].bias.dtype
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
        scores = spec.apply_soft_cap(scores).view(*queries.shape[:-1], -1).add_(batch.bias)
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


def _attend_single_pages(q: Tensor, keys: Tensor, values: Tensor, batch: PageBatch, spec: AttentionSpec) -> Tensor:
    """Return attention [B, H, V] of sequences with one page each, by an ordinary softmax."""
    assert batch.page_of_row is not None
    queries = batch.gather_rows(q, keys.shape[1]).flatten(2, 3)
    scores = spec.apply_soft_cap(torch.matmul(queries, batch.read(keys).transpose(-1, -2))).add(batch.bias[:, :, 0])
    sinks = None if spec.sinks is None else spec.sinks.view(keys.shape[1], -1)
    out = torch.matmul(softmax_with_sinks(scores, sinks), batch.read(values))
    return out.view(-1, q.shape[1], values.shape[-1]).index_select(0, batch.page_of_row)


def page_batches(
    pages: np.ndarray, lengths: np.ndarray, cache: PagedCache, window: int | None, dtype: torch.dtype
) -> list[PageBatch]:
    """Return the pages that decode rows attend to within `window`: pages of one row, and shared pages.

    A shared page is read once for up to `_MAX_SLOTS` rows, which saves memory traffic for the samples of a prompt.
    """
    size = cache.page_size
    first_token = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    index = np.arange(pages.shape[1])
    visible = (index >= (first_token // size)[:, None]) & (index <= ((lengths - 1) // size)[:, None])
    row, ordinal = np.nonzero(visible)
    page = pages[row, ordinal]
    order = np.argsort(page, kind="stable")
    page, row, position = page[order], row[order], ordinal[order] * size

    first_entry, counts = np.unique(page, return_index=True, return_counts=True)[1:]
    rank = np.arange(len(page)) - np.repeat(first_entry, counts)  # of a row among those with the same page
    shared = np.repeat(counts > 1, counts)
    bounds = first_token, lengths
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
) -> PageBatch:
    """Return a batch of pages with `slots` rows per page.

    Args:
        entries: arrays of page, decode row, position of the page's first token, and index of the entry among entries
            with the same page; sorted by page.
        slots: rows per page.
        bounds: first visible position of each decode row, and the end of its visible positions.
        cache: the pool of pages.
        dtype: dtype of the scores.
    """
    page, row, position, rank = entries
    # A page with more rows than slots occurs several times.
    is_new = np.concatenate([[True], (page[1:] != page[:-1]) | (rank[1:] % slots == 0)])
    index, pages = np.cumsum(is_new) - 1, page[is_new]
    selection: Tensor | slice = to_device_async(torch.from_numpy(pages), cache.device)
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
    bias.masked_fill_(to_device_async(torch.from_numpy(~visible), cache.device), -torch.inf)
    page_of_row = None
    if slots == 1 and (np.bincount(row, minlength=len(bounds[0])) == 1).all():
        page_of_row = to_device_async(torch.from_numpy(index[np.argsort(row)]), cache.device)
    slot_rows_P = to_device_async(torch.from_numpy(slot_rows.reshape(-1)), cache.device)
    return PageBatch(selection, slot_rows_P, bias[:, None, :, None, :], page_of_row)
